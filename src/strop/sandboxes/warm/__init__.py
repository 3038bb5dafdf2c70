"""The warm parent: a program of its own that runs inside the outer bubblewrap.

It is started as a script by the box's interpreter, so its modules use the standard library only and import each other by bare
name. Nothing else in strop imports them. It owns no state beyond its control socket; one run at a time, one fork per run.
"""
