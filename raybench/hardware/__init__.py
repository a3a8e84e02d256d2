"""The devices themselves: identity, counters, telemetry, datasheet peaks."""
