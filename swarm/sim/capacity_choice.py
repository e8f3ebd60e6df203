"""stub"""

from typing import Any

Choice = Any
