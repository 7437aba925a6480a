"""The report of a replay: as text for people, as JSON for programs."""
