"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How fast an example is drawn says something about the machine, not about the code under test.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
