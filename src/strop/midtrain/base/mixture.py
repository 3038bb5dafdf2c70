"""Which kinds of documents the base sees, and when."""

KIND_SHARES = {
    "repair": 0.62,
    "episode": 0.11,
    "navigate": 0.11,
    "copy": 0.05,
    "code": 0.03,
    "pointer": 0.02,
    "lookup": 0.04,
    "repeat": 0.02,
}
CURRICULUM = (
    (3000, {"repeat": 0.2, "pointer": 0.6, "corrupt": 0.2}),
    (7000, {"repeat": 0.05, "pointer": 0.2, "corrupt": 0.2, "lookup": 0.1, "repair": 0.45}),
)
"""Up to which document which shares hold; after the last, ``KIND_SHARES``."""
