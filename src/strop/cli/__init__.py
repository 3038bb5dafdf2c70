"""The command ``strop``, and the one place that builds a run out of named parts."""
