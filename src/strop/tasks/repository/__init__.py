"""From a source that somebody has (a git checkout, a source archive, a package name) to files that can be worked on and a suite that runs.

Everything of a repository is hostile data until it is inside a box: archives are read member by member, git objects are read by a git that
knows only its own configuration, and setup code, imports and tests run in bubblewrap.
"""
