"""Bytes of RoutePacks for the router shapes of known models. ``python benchmarks/routes_bytes.py``"""

from __future__ import annotations

import time

import numpy as np

from strop.core.route_pack import RoutePack, RouteSegment
from strop.core.routes import RouterSpec, id_dtype
from strop.ui.results import write_result

SHAPES = {
    "strop tiny 6x2 of 8": (6, 8, 2),
    "Mixtral 32x2 of 8": (32, 8, 2),
    "OLMoE 16x8 of 64": (16, 64, 8),
    "Qwen3-30B-A3B 48x8 of 128": (48, 128, 8),
    "gpt-oss-120b 36x4 of 128": (36, 128, 4),
    "DeepSeek-V3 58x8 of 256": (58, 256, 8),
    "Kimi-K2 60x8 of 384": (60, 384, 8),
}
ROWS = 2048


def uniform_pack(layers: int, experts: int, top_k: int) -> RoutePack:
    """Uniform random sets: the worst case of any code."""
    rng = np.random.default_rng(0)
    ids = np.empty((ROWS, layers, top_k), id_dtype(experts))
    for layer in range(layers):
        ids[:, layer] = np.sort(rng.random((ROWS, experts)).argpartition(top_k, -1)[:, :top_k], -1)
    spec = RouterSpec(layers=tuple(range(layers)), experts=experts, top_k=top_k)
    segments = (RouteSegment(start=0, end=ROWS, version=1),)
    valid = np.ones(ROWS, np.bool_)
    return RoutePack(start=0, experts=experts, expert_ids=ids, valid=valid, router=spec.digest(), tokens=bytes(16), segments=segments)


def main() -> None:
    """Measure, print, write ``docs/results/routes-bytes.json``."""
    details = {}
    for name, (layers, experts, top_k) in SHAPES.items():
        pack = uniform_pack(layers, experts, top_k)
        began = time.process_time()
        plain, ranked = pack.encode(ranked=False), pack.encode()
        encode_s = time.process_time() - began
        began = time.process_time()
        assert np.array_equal(RoutePack.decode(ranked).expert_ids, pack.expert_ids)
        decode_s = time.process_time() - began
        ids = pack.expert_ids.size
        details[name] = {
            "plain bytes per id": len(plain) / ids,
            "ranked bytes per id": len(ranked) / ids,
            "ranked / plain": len(ranked) / len(plain),
            "ranked bytes per token": len(ranked) / ROWS,
            "encode CPU us per token": 1e6 * encode_s / ROWS,
            "decode CPU us per token": 1e6 * decode_s / ROWS,
        }
        print(name, {key: round(value, 3) for key, value in details[name].items()})
    small = [value for name, value in details.items() if not name.startswith("Kimi")]
    worst = max(value["ranked / plain"] for value in details.values())
    write_result(
        "routes-bytes",
        bar="bytes of routes",
        goal="<= 1 byte per expert id up to 256 experts, packed form <= 0.7 of that; nothing as JSON",
        figure=worst,
        unit="x of the plain form, worst shape",
        met=worst <= 0.7 and max(value["ranked bytes per id"] for value in small) <= 1.0,
        command="python benchmarks/routes_bytes.py",
        seeds=(0,),
        notes="Uniform random sets, the worst case of any code. Packed is below 0.7 for 2 of 8, 8 of 64, 8 of 128 and 8 of 384; "
        "4 of 128 and 8 of 256 miss it because log2 binomial(E, K) / 8K is 0.73 and 0.76: no code without a model of the "
        "router does better there. Whole packs "
        f"of {ROWS} rows, header included.",
        details=details,
    )


if __name__ == "__main__":
    main()
