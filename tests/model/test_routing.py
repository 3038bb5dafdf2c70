"""One suite for every family: identity, capture, replay, gradients, recomputation, policies, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from routing_kit import FAMILY_SETTINGS, SPARSE_LAYERS, tiny, tokens

from strop.core.errors import ConfigError, NumericsError
from strop.model.routing.families import bind_routers, spec_of
from strop.model.routing.tape import RouteTape, fragile_only, plausible

FAMILIES = sorted(FAMILY_SETTINGS)
pytestmark = pytest.mark.filterwarnings("ignore")


def captured(model: torch.nn.Module, ids: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    with torch.no_grad(), RouteTape(model) as tape:
        logits = model(input_ids=ids, use_cache=False).logits
    return tape.routes(), logits


def other_routes(routes: np.ndarray, experts: int = 8) -> np.ndarray:
    """Sets that differ from ``routes`` in one expert."""
    result = routes.copy()
    for row in result.reshape(-1, routes.shape[-1]):
        row[-1] = next(expert for expert in range(experts) if expert not in row)
    return np.sort(result, -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_are_bound_by_layer(family: str) -> None:
    model = tiny(family)
    routers = bind_routers(model)
    spec = spec_of(routers)
    assert spec.layers == SPARSE_LAYERS.get(family, (0, 1, 2))
    assert (spec.experts, spec.top_k) == (8, 2)
    assert spec.has_bias == (family in ("deepseek-v3", "glm4-moe"))


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_the_live_routes_changes_nothing(family: str) -> None:
    model, ids = tiny(family), tokens()
    routes, plain = captured(model, ids)
    assert routes.shape == (48, len(bind_routers(model)), 2)
    with torch.no_grad(), RouteTape(model, routes=routes) as tape:
        replayed = model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(plain, replayed, atol=2e-6)
    assert np.array_equal(tape.natural(), tape.routes())
    with torch.no_grad():  # the model is untouched afterwards
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_routes_are_used_and_weighed_by_the_routers_own_rule(family: str) -> None:
    model, ids = tiny(family), tokens()
    routes, plain = captured(model, ids)
    with torch.no_grad(), RouteTape(model, routes=other_routes(routes)) as tape:
        moved = model(input_ids=ids, use_cache=False).logits
    assert not torch.allclose(plain, moved, atol=1e-3)
    assert np.array_equal(tape.routes(), other_routes(routes))
    assert not np.array_equal(tape.natural(), tape.routes())
    # The rule itself: on live sets it is the router's own output, whatever the order of its ids.
    for router in bind_routers(model):
        hidden = torch.randn(20, 32, generator=torch.Generator().manual_seed(1))
        logits, weights, chosen = router.module(hidden)
        assert torch.allclose(router.weights(logits, chosen), weights.float(), atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_router_gradient_is_live_at_drifted_routes_and_equals_finite_differences(family: str) -> None:
    model, ids = tiny(family).double(), tokens(12, 1)
    routes, _ = captured(model, ids)
    forced = other_routes(routes)
    router = bind_routers(model)[-1]
    weight = router.module.weight
    targets = ids[0, 1:]

    def loss() -> torch.Tensor:
        with RouteTape(model, routes=forced):
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, targets)

    model.zero_grad()
    loss().backward()
    gradient = weight.grad.clone()
    used = np.unique(forced[:, -1])
    assert all(float(gradient[expert].abs().max()) > 0 for expert in used)
    draw = torch.Generator().manual_seed(2)
    direction = torch.randn(weight.shape, generator=draw).double()
    step = 1e-3  # scores are float32 in the routers, so a smaller one would measure rounding
    with torch.no_grad():
        weight += step * direction
        high = float(loss())
        weight -= 2 * step * direction
        low = float(loss())
        weight += step * direction
    assert (high - low) / (2 * step) == pytest.approx(float((gradient * direction).sum()), rel=2e-2, abs=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_gradient_passes_through_the_selection(family: str) -> None:
    """What a router's own scores can't reach must get none: with a softmax over the chosen ones, unchosen experts."""
    model, ids = tiny(family), tokens(4, 1)
    routes, _ = captured(model, ids)
    forced = np.broadcast_to(np.array([0, 1]), routes.shape).copy()
    router = bind_routers(model)[-1]
    with RouteTape(model, routes=forced):
        model(input_ids=ids, use_cache=False).logits.square().sum().backward()
    unchosen = float(router.module.weight.grad[2:].abs().max())
    chosen = float(router.module.weight.grad[:2].abs().max())
    assert chosen > 0
    if router.family.scoring != "softmax" or router.normalised:
        assert unchosen <= 1e-6 * chosen
    else:
        assert unchosen > 0  # their part of the softmax's sum is live


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_see_the_same_routes(family: str) -> None:
    model, ids = tiny(family), tokens()
    routes = other_routes(captured(model, ids)[0])

    def gradients(checkpointing: bool) -> tuple[dict[str, torch.Tensor], RouteTape]:
        model.train()
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with RouteTape(model, routes=routes) as tape:
            model(input_ids=ids, use_cache=False).logits.square().mean().backward()
        if checkpointing:
            model.gradient_checkpointing_disable()
        model.eval()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, tape

    plain, once = gradients(False)
    again, twice = gradients(True)
    assert set(once.calls.values()) == {1}
    assert set(twice.calls.values()) == {2}
    assert plain.keys() == again.keys()
    assert all(torch.allclose(plain[name], again[name], atol=1e-6) for name in plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_without_a_record_are_live_and_counted(family: str) -> None:
    model, ids = tiny(family), tokens()
    routes, plain = captured(model, ids)
    junk = np.zeros_like(routes)
    with torch.no_grad(), RouteTape(model, routes=junk, valid=np.zeros(48, np.bool_)) as tape:
        assert torch.allclose(model(input_ids=ids, use_cache=False).logits, plain, atol=2e-6)
    assert tape.fallback_rows == 48
    assert np.array_equal(tape.routes(), routes)


@pytest.mark.parametrize("family", FAMILIES)
def test_policies_lie_between_live_and_recorded(family: str) -> None:
    model, ids = tiny(family), tokens()
    live, _ = captured(model, ids)
    record = other_routes(live)
    shares = []
    for make in (fragile_only, plausible):
        for bound in (0.0, 0.1, 1e9):
            with torch.no_grad(), RouteTape(model, routes=record, policy=make(bound)) as tape:
                model(input_ids=ids, use_cache=False)
            shares.append(float((tape.routes() == record).all(-1).mean()))
            if bound == 0.0 and (make is fragile_only or family not in ("deepseek-v3", "glm4-moe")):
                assert np.array_equal(tape.routes(), tape.natural())
    assert shares[0] <= shares[1] <= shares[2] == 1.0
    assert shares[3] <= shares[4] <= shares[5] == 1.0
    assert shares[0] < 0.2
    assert shares[3] < 0.5  # routers with groups pass over experts of good score; those stay plausible


@pytest.mark.parametrize("family", FAMILIES)
def test_faults_are_refused_before_anything_is_computed_with_them(family: str) -> None:
    model, ids = tiny(family), tokens()
    routes, _ = captured(model, ids)
    twice = np.zeros_like(routes)
    beyond = routes.copy()
    beyond[5, 0, 1] = 8
    cases = {
        "expert twice": (twice, "twice"),
        "foreign expert": (beyond, "outside 0..7"),
        "missing rows": (routes[:-1], "never cut or padded"),
        "padded": (np.concatenate([routes, routes[-1:]]), "never cut or padded"),
        "mtp layer": (np.concatenate([routes, routes[:, -1:]], 1), "needs"),
        "dense first": (routes[:, 1:], "needs"),
    }
    for bad, message in cases.values():
        with pytest.raises(NumericsError, match=message), torch.no_grad(), RouteTape(model, routes=bad):
            model(input_ids=ids, use_cache=False)


def test_routes_that_nobody_used_are_an_error() -> None:
    model, ids = tiny("mixtral"), tokens()
    routes, _ = captured(model, ids)
    with pytest.raises(NumericsError, match="never ran"), RouteTape(model, routes=routes):
        pass


def test_auxiliary_losses_get_live_logits() -> None:
    model, ids = tiny("qwen3-moe"), tokens()
    routes, _ = captured(model, ids)
    with RouteTape(model, routes=other_routes(routes)) as tape:
        model(input_ids=ids, use_cache=False)
    sum(layer.logsumexp(-1).square().mean() for layer in tape.logits()).backward()  # type: ignore[union-attr]
    assert all(float(router.module.weight.grad.abs().max()) > 0 for router in bind_routers(model))


def test_a_layer_of_multi_token_prediction_is_not_counted() -> None:
    model = tiny("deepseek-v3")
    inner = model.model
    plain = spec_of(bind_routers(model))
    inner.layers.append(inner.layers[-1])  # position num_hidden_layers, where checkpoints keep it
    assert spec_of(bind_routers(model)) == plain
    inner.mtp = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([tiny("deepseek-v3", 1).model.layers[-1]])})
    assert spec_of(bind_routers(model)) == plain


def test_a_dense_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="Linear has no router of a known family"):
        bind_routers(torch.nn.Linear(2, 2))


def test_specs_agree_between_the_embedded_engine_and_transformers() -> None:
    from strop.model.config import DecoderConfig
    from strop.model.routing.families import router_spec

    model = tiny("qwen3-moe")
    assert router_spec(DecoderConfig.from_hf(model.config.to_dict())) == spec_of(bind_routers(model))
