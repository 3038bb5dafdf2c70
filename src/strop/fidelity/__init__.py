"""Can a policy tell the boxes that it trains in from those that it will work in? Probes, a two-sample test, a gate.

``inside`` runs in a box, ``collect`` asks many boxes of each kind, ``encode`` and ``twosample`` hold the answers against each other,
``report`` says what to do about it. ``behaviour`` asks the other way round: does a policy act differently in a box that it can recognise?
Nothing here knows a sandbox back end.
"""
