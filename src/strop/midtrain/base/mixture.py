"""Which kinds of documents the base sees, and when."""

KIND_SHARES = {
    "repair": 0.52,
    "episode": 0.19,
    "navigate": 0.13,
    "copy": 0.07,
    "code": 0.03,
    "pointer": 0.02,
    "lookup": 0.03,
    "repeat": 0.01,
}
CURRICULUM = (
    (3000, {"repeat": 0.2, "pointer": 0.6, "corrupt": 0.2}),
    (7000, {"repeat": 0.05, "pointer": 0.2, "corrupt": 0.2, "lookup": 0.1, "repair": 0.45}),
)
"""Up to which document which shares hold; after the last, ``KIND_SHARES``."""
