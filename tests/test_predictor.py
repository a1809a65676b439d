"Look-ahead in every family; corrections that are learned, kept, refused and calibrated; nothing half done."
import math
import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from expertflow import predictor as P
from expertflow.bundled import MODELS
from expertflow.card import load_card, read_card, save_card
from expertflow.config import CheckpointError, ConfigError
from expertflow.flow import ExpertFlow, find_checkpoint
from expertflow.foresight import Foresight
from expertflow.predictor import (
    Correction,
    LayerAhead,
    Streams,
    batches,
    calibrate,
    check_size,
    closed_form,
    corrected,
    evaluate_predictor,
    gather,
    learn_layer,
    load_predictor,
    margin,
    missed_loss,
    past_of,
    polish,
    recalls,
    time_share,
    train_predictor,
)
from expertflow.quality import calibration_error
from expertflow.taps import Watch, find_taps, read_routing
from expertflow.testing import FAMILIES, write_checkpoint

@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tmp_path_factory.mktemp("predictor")


def tiny(): return AutoModelForCausalLM.from_pretrained(find_checkpoint("tiny-moe"), dtype="auto")


@pytest.fixture(scope="module")
def model(): return tiny()


@pytest.fixture(scope="module")
def taps(model): return find_taps(model)


def text(n: int, seed: int, length: int = 64) -> torch.Tensor:
    "Sequences that the model has written itself, from random beginnings."
    torch.manual_seed(seed)
    start = torch.randint(300, 4000, (n, 4))
    return tiny().generate(start, attention_mask=torch.ones_like(start), do_sample=True, max_new_tokens=length - 4,
                           min_new_tokens=length - 4)


@pytest.fixture(scope="module")
def streams(model, taps): return gather(model, taps, text(48, 0)), gather(model, taps, text(16, 1))


# gates

# These choose groups first, or experts that do nothing: neither is in the score.
GROUPED = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "dots1", "solar_open",
           "axk1", "nemotron_h", "exaone_moe", "longcat_flash"}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_gate_look_ahead_says_what_the_next_routers_say(family, folder):
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(family, folder / family, shard_bytes=None))
    taps = find_taps(model)
    p, got = LayerAhead(taps, ahead=2, shared=False), {}

    def see(layer, r, out): got[layer] = r.clone(), p(layer, r, read_routing(out)), read_routing(out)

    with Watch(taps, see), torch.no_grad(): model(torch.arange(5, 45)[None])
    for layer, (r, probs, _) in got.items():
        assert probs.shape == (40, 2, p.E) and probs.min() >= 0 and probs.max() <= 1
        assert not probs[:, len(taps) - 1 - layer:].any()
        for d, t in enumerate(p.targets(layer)):
            with torch.no_grad(): want = t.route(r).ids
            best = probs[:, d].topk(t.top_k, -1).indices
            same = (want[:, :, None] == best[:, None]).any(-1).float()[(want < p.E).all(1)]
            assert same.mean() >= (.6 if family in GROUPED else .97), f"{family}: {same.mean()}"


def test_layer_count_is_what_limits(taps):
    with torch.no_grad():
        p = LayerAhead(taps, ahead=4)
        r = torch.randn(3, 128).bfloat16()
        assert p(7, r, taps[7].route(r)).abs().sum() == 0
        assert (p(6, r, taps[6].route(r)).sum((0, 2)) > 0).tolist() == [True, False, False, False]


# the past

@pytest.mark.parametrize("cut", [1, 5, 11])
def test_past_in_pieces_is_the_past(cut):
    x = torch.randn(2, 12, 8)
    whole, after = past_of(x, None)
    a, state = past_of(x[:, :cut], None)
    b, state = past_of(x[:, cut:], state)
    for k in range(2):
        joined = torch.cat([a[k].view(2, cut, 8), b[k].view(2, 12 - cut, 8)], 1)
        torch.testing.assert_close(joined, whole[k].view(2, 12, 8))
        torch.testing.assert_close(state[k], after[k])
    assert torch.equal(whole[0].view(2, 12, 8)[:, 1:], x[:, :-1])


@pytest.mark.parametrize("n", [1, 2])
def test_predicting_while_generating_is_what_was_learned(model, taps, streams, n):
    "Prompt and decode steps of one or two sequences: the same probabilities as from the recorded streams at once."
    p = LayerAhead(taps, context=True)
    for layer in range(7): p.corrections[layer] = closed_form(p, streams[0], layer, 16)
    ids, got = text(n, 5, 32), {i: [] for i in range(8)}
    once = gather(model, taps, ids)

    def see(layer, r, out): got[layer].append(p(layer, r, read_routing(out)).view(n, -1, 4, 32))

    with Watch(taps, see), torch.no_grad():
        out = model(ids[:, :20], use_cache=True)
        for t in range(20, 32): out = model(ids[:, t:t + 1], past_key_values=out.past_key_values, use_cache=True)
    for layer in range(7):
        X, base, _, _ = next(batches(p, once, layer))
        z = margin(corrected(p.corrections[layer], X, base), 4)
        a, b = p.curve[layer, :z.shape[1]].unbind(-1)
        want = torch.sigmoid(z * a[:, None] + b[:, None]).view(n, 32, -1, 32)
        have = torch.cat(got[layer], 1)[:, :, :z.shape[1]]
        assert (want - have).abs().mean() < .02, layer      # bfloat16 streams, other kernels for one row
    p.forget()
    assert not p.own.__dict__


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_single_token_is_no_special_case(family, folder):
    "Its way through numpy gives what the tensors of many tokens give, with corrections, shared experts and their gates."
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(family, folder / family, shard_bytes=None))
    taps = find_taps(model)
    p = LayerAhead(taps, ahead=2)
    torch.manual_seed(0)
    if taps[0].router.__dict__.get("_parameters", {}).get("weight") is not None:
        wide = taps[0].router.weight.shape[1] + p.E + 1
        for i in range(len(taps) - 1):
            p.corrections[i] = Correction(torch.randn(3, wide), torch.randn(len(p.targets(i)) * p.E, 3))
    off = []

    def see(layer, r, out):
        if n := len(p.targets(layer)):
            z = margin(p.scores(layer, r, read_routing(out)), taps[layer + 1].top_k)
            a, b = p.curve[layer, :n].unbind(-1)
            off.append((p(layer, r, read_routing(out))[:, :n] - torch.sigmoid(z * a[:, None] + b[:, None])).abs().max())

    with Watch(taps, see), torch.no_grad(): model(torch.tensor([[7]]))
    assert off and max(off) < 2e-3, off
    assert p.rows or p.fold[0] is None      # it did take its own way


def test_threads_have_their_own_past(taps):
    p = LayerAhead(taps, context=True)
    p.remember(0, torch.ones(1, 128), 1)
    seen = []
    t = threading.Thread(target=lambda: seen.append(p.remember(0, torch.ones(1, 128), 1)[0].abs().sum().item()))
    t.start(), t.join()
    assert seen == [0] and p.remember(0, torch.ones(1, 128), 1)[0].sum() == 128
    assert p.remember(0, torch.ones(2, 128), 2)[0].sum() == 0      # another number of sequences: others


# learning

def test_gather_keeps_what_ran(model, taps):
    ids, seen = text(3, 2, 16), {}
    s = gather(model, taps, ids, batch=2)
    assert (len(s), s.length, len(s.residual)) == (3, 16, 8)
    see = lambda layer, r, out: seen.__setitem__(layer, (r.clone(), read_routing(out)))
    with Watch(taps, see), torch.no_grad(): model(ids[1:2])
    for layer, (r, routing) in seen.items():
        stream, again = s.rows(layer, torch.tensor([1]))
        assert (stream - r).norm() < .02 * r.norm()
        assert (again.ids.sort(-1).values == routing.ids.sort(-1).values).float().mean() > .97     # batches round differently


def test_closed_form_is_the_least_squares_solution(taps, streams):
    p = LayerAhead(taps)
    X, base, true, _ = (torch.cat(x) for x in zip(*batches(p, streams[0], 3)))
    want = (true - base) - (true - base).mean(-1, keepdim=True)
    best = torch.linalg.lstsq(X.double(), want.flatten(1).double()).solution
    full = closed_form(p, streams[0], 3, rank=128, ridge=1e-9)
    got = (X.double() @ full.down.double().T @ full.up.double().T)
    assert (got - X.double() @ best).norm() < .02 * got.norm()
    errors = [(X @ c.down.T @ c.up.T - want.flatten(1)).norm().item()
              for c in (closed_form(p, streams[0], 3, rank=r) for r in (1, 4, 16, 64, 128))]
    assert errors == sorted(errors, reverse=True) and errors[0] < want.norm()


def test_it_learns(taps, streams):
    p, plain = LayerAhead(taps, context=True), LayerAhead(taps, shared=False)
    before = recalls(plain, streams[1], 1, None)
    c = closed_form(p, streams[0], 1, 16)
    after = recalls(p, streams[1], 1, c)
    assert (after > before).all()
    better = list(polish(p, streams[0], 1, c, epochs=2))
    k = p.taps[2].top_k
    losses = [np.mean([missed_loss(corrected(x, X, base), true, k).item() for X, base, true, _ in batches(p, streams[0], 1)])
              for x in (None, c, *better)]
    assert losses == sorted(losses, reverse=True), losses


def test_what_a_miss_counts():
    "Of errors equally far from the border, the more the farther they are, and MISSED times a load in vain in the end."
    ratios = []
    for n in (64, 256, 4096, 65536):
        true = torch.zeros(1, n)
        true[0, :4] = 8.
        missed, surplus = true.clone(), true.clone()
        missed[0, 3], surplus[0, 4] = 0., 8.
        perfect = missed_loss(true, true, 4)
        ratios.append(((missed_loss(missed, true, 4) - perfect) / (missed_loss(surplus, true, 4) - perfect)).item())
    assert ratios == sorted(ratios) and ratios[0] > 1.5 and .9 * P.MISSED < ratios[-1] < P.MISSED, ratios


def test_what_does_not_help_is_not_kept(taps, streams):
    p = LayerAhead(taps)
    c = closed_form(p, streams[0], 4, 8)
    harmful = P.Correction(c.down, c.up * -30)
    row = learn_layer(p, streams[0], streams[1], 4, 8, epochs=0, start=harmful)
    assert row["kept"] == "none" and 4 not in p.corrections
    row = learn_layer(p, streams[0], streams[1], 4, 8, epochs=0)
    assert row["kept"] == "closed form" and p.corrections[4].down.shape[0] == 8


def test_calibration(taps, streams):
    p = LayerAhead(taps)
    p.curve[:] = torch.tensor([9., 3.])

    def errors():
        out = []
        for _, base, _, y in batches(p, streams[1], 5, size=64):
            z = margin(base, 4)
            a, b = p.curve[5, :z.shape[1]].unbind(-1)
            probs = torch.sigmoid(z * a[:, None] + b[:, None])
            out += [calibration_error(probs[:, d].numpy(), y[:, d].numpy() > 0) for d in range(2)]
        return out

    assert min(errors()) > .08
    calibrate(p, streams[1], 5)
    assert max(errors()) < .03
    assert torch.equal(p.curve[4], torch.tensor([9., 3.]).expand(4, 2))        # others stay


def test_evaluation_agrees_with_recalls(taps, streams):
    p = LayerAhead(taps)
    t = evaluate_predictor(p, streams[1], predictor="gate", phase="prompt")
    assert len(t) == sum((4, 4, 4, 4, 3, 2, 1))
    for layer in range(7):
        np.testing.assert_allclose(t.pick(layer=layer)["recall"], recalls(p, streams[1], layer, None).numpy(), atol=2e-3)
    late = evaluate_predictor(p, streams[1], since=32)
    assert late.rows[0]["rows"] == t.rows[0]["rows"] // 2


# files

@pytest.fixture(scope="module")
def trained(model, streams, folder):
    path = folder / "p.safetensors"
    return path, train_predictor(model, *streams, path, epochs=1, progress=False, text="its own")


def test_trained_file_is_whole(model, trained):
    path, p = trained
    card, q = read_card(path), load_predictor(path, model)
    assert card["model_parameters"] / 1000 <= card["parameters"] == p.parameters() <= card["model_parameters"] / 100
    assert card["model_parameters"] == sum(x.numel() for x in model.parameters())
    assert len(card["log"]) == 7 and card["text"] == "its own" and not path.with_name(path.name + ".part").exists()
    r = torch.randn(5, 128).bfloat16()
    for layer in range(8):
        with torch.no_grad(): routing = p.taps[layer].route(r)
        assert torch.equal(p(layer, r, routing), q(layer, r, routing))
    for row in card["log"]: assert row["kept"] in [t["what"] for t in row["tries"]]


def test_a_broken_off_training_goes_on(model, streams, trained, tmp_path, monkeypatch):
    path, calls, learn = tmp_path / "p.safetensors", [], P.learn_layer

    def stop(*args, **kwargs):
        calls.append(args[3])
        if calls == [0, 1, 2, 3]: raise KeyboardInterrupt
        return learn(*args, **kwargs)

    monkeypatch.setattr(P, "learn_layer", stop)
    with pytest.raises(KeyboardInterrupt): train_predictor(model, *streams, path, epochs=1, progress=False)
    assert not path.exists()
    train_predictor(model, *streams, path, epochs=1, progress=False)
    assert calls == [0, 1, 2, 3, 3, 4, 5, 6]
    (a, one), (b, two) = load_card(path, P.KIND), load_card(trained[0], P.KIND)
    assert all(torch.equal(a[k], b[k]) for k in b) and one["log"] == two["log"]
    calls[:] = [-1]
    train_predictor(model, streams[0], streams[1], path, epochs=1, seed=1, progress=False)   # another setup: anew
    assert calls[1] == 0


def test_fine_tuning_begins_with_the_file(model, streams, trained, tmp_path):
    path = tmp_path / "tuned.safetensors"
    train_predictor(model, *streams, path, epochs=0, start=trained[0], progress=False)
    old, new = load_predictor(trained[0], model), load_predictor(path, model)
    assert all(torch.equal(c.down, old.corrections[i].down) for i, c in new.corrections.items())
    assert {t["what"] for row in read_card(path)["log"] for t in row["tries"]} == {"none", "start"}


def test_files_of_others_are_refused(model, trained, folder, tmp_path):
    path = trained[0]
    other = write_checkpoint("qwen3_moe", folder / "other", num_hidden_layers=8)
    stranger = AutoModelForCausalLM.from_pretrained(other)
    with pytest.raises(CheckpointError, match=r"was made for the model with fingerprint .* \(tiny-moe\), not for"):
        load_predictor(path, stranger)
    with pytest.raises(CheckpointError, match="no predictor in the package"): load_predictor(None, stranger)
    cut = tmp_path / "cut.safetensors"
    data = path.read_bytes()
    for n in (0, 7, 100, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:n])
        with pytest.raises(CheckpointError) as e: load_predictor(cut, model)
        assert "\n" not in str(e.value)
    tensors, card = load_card(path, P.KIND)
    for bad in ({"curve": tensors["curve"], "down.0": tensors["down.0"]}, {}, tensors | {"curve": torch.zeros(2, 2)},
                tensors | {"up.2": tensors["up.2"][:5]}, tensors | {"down.2": tensors["down.2"][:, 5:]}):
        save_card(cut, bad, card)
        with pytest.raises(CheckpointError, match="incomplete"): load_predictor(cut, model)
    save_card(cut, tensors, card | {"kind": "path predictor"})
    with pytest.raises(CheckpointError, match="path predictor"): load_predictor(cut, model)


def test_size_is_a_rule(taps, streams):
    p = LayerAhead(taps)
    p.corrections[3] = closed_form(p, streams[0], 3, 128)
    check_size(p, p.parameters() * 500)
    for n in (p.parameters() * 99, p.parameters() * 1001):
        with pytest.raises(ConfigError, match=r"0\.1 % to 1 %"): check_size(p, n)


# with the runtime

@pytest.mark.parametrize("shipped", [False, True])
def test_prefetching_by_it_changes_no_bit(shipped):
    ids = torch.tensor([[300, 400, 500, 600]])
    with torch.no_grad(): want = tiny().generate(ids, max_new_tokens=24, do_sample=False)
    with ExpertFlow.from_pretrained("tiny-moe", gpu_memory_budget="40%", device="cpu") as flow:
        taps = find_taps(flow.model)
        p = load_predictor(None, flow, taps) if shipped else LayerAhead(taps)
        f = Foresight(flow.runtime, taps, p, lookahead=2)
        got = flow.model.generate(ids, max_new_tokens=24, do_sample=False)
        assert torch.equal(got, want)
        assert f.tally.recall()[0] > .6 and flow.runtime.cache.count.prefetched > 0
        f.close()


@pytest.mark.parametrize("name", ["tiny-moe", "smollm2-moe"])
def test_shipped_predictors_are_within_their_size(name):
    card = read_card(P.SHIPPED / f"{name}.safetensors")
    assert card["kind"] == P.KIND and card["name"].startswith(name)
    assert card["model_parameters"] / 1000 <= card["parameters"] <= card["model_parameters"] / 100
    assert (P.SHIPPED / f"{name}.safetensors").stat().st_size < 3_000_000
    assert math.isclose(card["setup"]["seed"], 0) and MODELS.exists()


def test_time_share_comes_from_one_run(model, taps):
    x = time_share(model, LayerAhead(taps), torch.tensor([[300, 400, 500]]), steps=8)
    assert 0 < x["share"] < 2 and x["predict"] < x["step"] * 2


def test_streams_from_files_are_as_good(streams):
    s = streams[1]
    copy = Streams(s.length, [r.clone() for r in s.residual], s.ids, s.weights)
    assert P.digest(copy) == P.digest(s) != P.digest(streams[0])
