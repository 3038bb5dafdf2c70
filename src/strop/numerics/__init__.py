"""Numbers under watch: digests, comparators, canaries, and the statistics of evaluation."""
