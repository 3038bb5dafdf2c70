"""Tasks that others made: readers and writers of their formats, strict about every key, suspicious of every file."""
