"""Set before any test imports Ray: it reads these once."""

import os

# Without it `ray.init()` leaves a token in the home folder, and every later `ray start` on the machine demands it.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
