"""The clock of leases.

CLOCK_BOOTTIME goes on while a machine is suspended and is one clock for all processes of a machine, so a decode engine
that slept through its lease knows it. Hosts never compare clocks: a lease counts from the moment its claim was sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]

if hasattr(time, "CLOCK_BOOTTIME"):

    def lease_clock() -> float:
        """Seconds since boot, suspended time included."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:

    def lease_clock() -> float:
        """Seconds of the monotonic clock, where there is no boot-time clock."""
        return time.monotonic()
