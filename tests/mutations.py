"""Takes one guarantee at a time out of a copy of the tree, and shows that a named test fails without it.

    bin/python -m tests.mutations                  all of them: a few minutes
    bin/python -m tests.mutations stale-batch ...  these alone

A mutation replaces a text that occurs once in swarm/, whatever module has it. It is caught if its test, which passes
before, fails with it. The exit status is 1 if any was missed, or if a text, a test or a name is not there any more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

TREE = Path(__file__).parents[1]
TEST_S = 120  # After so long a test counts as failed: what a mutation lets through may wait for ever

MUTATIONS = r"""
I1 stale-batch test_a_lower_bound_drops_what_is_ready_and_too_old_by_it
- sorted(version for version in self._ready if is_fresh(version, next_batch, max_staleness))
+ sorted(self._ready)
I1 bound-by-one test_an_answer_that_only_a_lower_bound_makes_stale_is_counted_as_such
- return staleness(version, next_batch) <= max_staleness
+ return staleness(version, next_batch) <= max_staleness + 1
I2 chunk-digest test_no_chunk_but_the_signed_one_is_accepted
- if len(data) != self.spans[index].nbytes or digest(data) != self._digests[index]:
+ if len(data) != self.spans[index].nbytes:
I2 region-digest test_a_region_that_does_not_decode_to_what_was_signed_is_never_written
- if digest(beside) != entry.decoded_digest:
+ if False:
I2 changes-digest test_a_region_that_does_not_decode_to_what_was_signed_is_never_written
- if digest(beside.data) != held.table.regions[index].decoded_digest:
+ if False:
I2 unsigned-head test_a_head_by_another_key_or_of_another_swarm_is_refused
- verify(context, sealed.body, sealed.signature, public_bytes)
+ pass
I2 engine-sums test_an_engine_that_holds_something_else_does_not_go_on
- if tensor_sum(_bytes_of(held.to(source.dtype))) != expected:
+ if False:
I3 second-answer test_a_late_answer_of_a_node_thought_silent_is_accepted_once
- return "duplicate", "this sample is answered"
+ return "accepted", ""
I3 batch-before-record test_a_batch_is_recorded_before_it_is_trained_on
- await self._journal.write(())
-         self._chances.tell()
+ self._chances.tell()
I3 verdict-before-record test_a_duplicate_is_told_only_once_its_original_is_committed
- if not await self._committed_soon():
-             return _come_back(SLOW_COMMIT)
-         found
+ found
I3 step-out-of-turn test_a_step_that_does_not_follow_the_one_before_is_refused
- and command.step != trainer.steps_taken:
+ and False:
I3 checkpoint-before-sync test_every_byte_and_name_is_on_the_disk_before_the_rename
- for path in (*entries, partial / DIGESTS, partial):
+ for path in (*entries, partial):
I4 older-weights test_an_older_version_is_refused
- if self._current is not None and target.head.version < self._current.head.version:
+ if False:
I4 older-head test_a_head_only_rises_and_must_be_the_learners
- if self.view.newest is not None and version <= self.view.newest:
+ if False:
I4 older-record test_only_a_higher_order_replaces_a_record
- if latest is not None and signed.order <= latest.signed.order:
+ if False:
I5 body-cap test_a_body_over_its_cap_is_refused_before_it_is_decoded
- if len(data) > cap_bytes:
+ if False:
I5 bomb test_a_header_that_claims_too_much_is_refused_before_a_byte_is_allocated
- if frame.content_size > cap_bytes or frame.content_size > max(
+ if frame.content_size > max(
I5 submissions-in-hand test_bodies_are_bounded_in_number_and_the_refused_wait_for_nothing
- return len(others) < most and _bytes_of(others)
+ return _bytes_of(others)
I5 session-table test_a_flood_of_new_sessions_is_bounded_and_spares_those_in_use
- elif len(self) >= MAX_SESSIONS:
+ elif False:
I6 no-death test_silence_ends_a_public_and_patience_stretches_it
- if p.heard_at < oldest_beat or p.risen_at < oldest_record]
+ if p.risen_at < oldest_record]
I6 no-refutation test_whoever_is_held_dead_hears_of_it_and_comes_back_with_a_higher_order
- if claimed.body == self.signed.body:
-             return self.issue()
+ if claimed.body == self.signed.body:
+             return []
I7 one-batch-too-many test_whatever_the_rule_admits_can_all_be_trained_in_time
- total > (d - next_batch + 1) * batch_groups + spare
+ total > (d - next_batch + 2) * batch_groups + spare
lies vocabulary test_a_malformed_answer_is_refused_with_its_reason
- max(tokens) >= vocab_size
+ max(tokens) > vocab_size
lies likelier-than-certain test_a_malformed_answer_is_refused_with_its_reason
- or max(values) > LOGPROB_SLACK:
+ or False:
lies tokens-without-version test_a_malformed_answer_is_refused_with_its_reason
- if span.start != at or span.end <= span.start:
+ if span.end <= span.start:
lies claims-limit test_before_anything_is_known_a_fixed_limit_counts
- if one.distance > self.limit(one.staleness)
+ if one.distance > 2 * self.limit(one.staleness)
lies auditor-limit test_a_shift_of_log_probs_is_caught_as_soon_as_the_formula_says
- if one.score >= limits.sum and
+ if one.score >= 2 * limits.sum and
lies other-seed test_seeds_are_the_same_in_every_process_and_differ_by_run_group_and_place
- f"{run_seed}/{group_id}/{index}"
+ f"{run_seed}/{group_id}"
identity unsigned-request test_an_altered_request_is_refused_and_uses_nothing_up
- verify(REQUEST_CONTEXT, encode(request), signature, granted.key)
+ pass
identity replayed-request test_a_replayed_request_is_refused
- granted.window.use(counter)
+ pass
identity other-sender test_a_node_speaks_for_itself_alone
- if named != node:
+ if False:
floods places-by-key test_keys_cost_nothing_so_they_do_not_buy_an_address_more_than_its_share
- min(proven, self._limits.nodes_per_address)
+ proven
volunteers file-of-code test_a_file_name_that_could_leave_its_directory_is_refused
- (?:json|txt|model|jinja)
+ (?:json|txt|model|jinja|py)
"""
"""Each: the invariant of ARCHITECTURE.md or the threat of docs/threats.md, a name, the test; what goes, what comes."""


class Mutation(NamedTuple):
    guards: str
    name: str
    test: str
    before: str
    after: str


def read_mutations() -> list[Mutation]:
    found: list[list[str]] = []
    for line in MUTATIONS.strip().splitlines():
        if line[:2] in ("- ", "+ "):
            found[-1][3 if line[0] == "-" else 4] += "\n" + line[2:]
        else:
            found.append([*line.split(), "", ""])
    return [Mutation(guards, name, test, gone[1:], come[1:]) for guards, name, test, gone, come in found]


def main(names: list[str]) -> int:
    mutations = [one for one in read_mutations() if one.name in names or not names]
    if not mutations or len(mutations) < len(names):
        raise SystemExit(f"there is no mutation of one of these names: {' '.join(names)}")
    with TemporaryDirectory() as place:
        copy = Path(place)
        copy_tree(copy)
        where = {one: module_with(one.before, copy / "swarm") for one in mutations}
        tests = {one: f"{module_with(f'def {one.test}(', copy / 'tests')}::{one.test}" for one in mutations}
        if run(copy, *dict.fromkeys(tests.values())) != 0:
            raise SystemExit("without any mutation these tests do not all pass")
        missed = [one.name for one in mutations if not is_caught(one, where[one], tests[one], copy)]
    print(f"{len(mutations) - len(missed)} of {len(mutations)} caught", *missed)
    return 1 if missed else 0


def copy_tree(copy: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=TREE, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        if (TREE / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TREE / name, copy / name)


def module_with(text: str, room: Path) -> Path:
    found = [path for path in room.rglob("*.py") for _ in range(path.read_text().count(text))]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} times in {room.name}/: {text}")
    return found[0]


def is_caught(one: Mutation, module: Path, test: str, copy: Path) -> bool:
    """Run its test with a mutation, and say what came of it."""
    began = time.monotonic()
    module.write_text(module.read_text().replace(one.before, one.after))
    status = run(copy, test)
    where = module.relative_to(copy)
    shutil.copy2(TREE / where, module)
    verdict = {0: "MISSED", 1: "caught"}.get(status, "DOES NOT RUN")
    print(f"{one.guards:11}{one.name:24}{verdict:8}{time.monotonic() - began:4.0f} s  {where}  {one.test}", flush=True)
    return status == 1


def run(copy: Path, *tests: str) -> int:
    """Return the exit status of pytest."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_S}", *tests]
    env = {**os.environ, "PYTHONPATH": str(copy)}
    return subprocess.run(command, cwd=copy, env=env, stdout=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
