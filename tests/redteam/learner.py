"""The learner of a campaign: what a hoarder holds is had back within the run."""

from __future__ import annotations

from swarm.__main__ import main
from swarm.lead import learner

LEASE_LIMIT_S = 10.0  # Samples take a tenth of a second: what a hoarder holds is had back after this and a minute

if __name__ == "__main__":
    learner.LEASE_LIMIT_S = LEASE_LIMIT_S
    main()
