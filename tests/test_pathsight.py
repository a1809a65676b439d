"The path predictor beside a running model: what it is told, whose sequences are whose, and that it never stands in the way."
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from expertflow.cache import check
from expertflow.checkpoint import Checkpoint
from expertflow.config import CheckpointError, ConfigError
from expertflow.flow import ExpertFlow, find_checkpoint
from expertflow.forecast import PredictedForecast
from expertflow.foresight import before_pass
from expertflow.paths import HORIZONS, PathPredictor, load_path, probabilities, record, shipped_path
from expertflow.pathsight import Follower, make_sight, path_file, together
from expertflow.taps import find_taps

PATH = find_checkpoint("tiny-moe")
IDS = torch.randint(300, 4000, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(): return AutoModelForCausalLM.from_pretrained(PATH, dtype="auto")


@pytest.fixture(scope="module")
def taps(model): return find_taps(model)


@pytest.fixture
def sight(model, taps):
    s = make_sight(shipped_path(PATH), model, taps, PredictedForecast([32] * 8, HORIZONS), threading.RLock())
    s.said = []
    s.forecast.update = s.said.append
    yield s
    s.close()


@pytest.fixture(scope="module")
def whole(model):
    "Probabilities for both texts at once [T, H, L, E] each."
    net, _ = load_path(shipped_path(PATH), PATH)
    data, embedding = record(model, IDS), model.get_input_embeddings().weight.detach()
    return [probabilities(net, data, i, embedding).reshape(24, len(HORIZONS), 8, 32) for i in range(2)]


@torch.no_grad()
def run(model, ids, *cuts):
    "A text in pieces, as prompt blocks and decode steps are."
    out, edges = None, [0, *cuts, ids.shape[1]]
    for a, b in pairwise(edges):
        cache = {} if out is None else {"past_key_values": out.past_key_values}
        out = model(ids[:, a:b], use_cache=True, **cache)
    return out


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("cuts", [(8, 9, 10, 11, 12), (1, 2, 3, 23), (12, 18)])
def test_pieces_of_a_text_are_the_text(model, sight, whole, cuts):
    run(model, IDS[:1], *cuts)
    assert sight.passes == len(cuts) + 1 and not sight.problem
    for p, a in zip(sight.said[1:], cuts):
        # the first token of a piece: all before it is known. Of a longer piece the union is told, which is at least that
        alone = whole[0][a, 0]
        nxt = min([c for c in (*cuts, 24) if c > a])
        assert (p[0] >= alone - .06).all()
        if nxt == a + 1: assert abs(p - whole[0][a]).max() < .06


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_batch_needs_what_any_sequence_needs(model, sight, whole):
    run(model, IDS, *range(10, 24))
    for p, t in zip(sight.said[1:], range(10, 24)):
        assert abs(p - (1 - (1 - whole[0][t]) * (1 - whole[1][t]))).max() < .1


def test_a_new_text_begins_anew(model, sight):
    run(model, IDS[:1], 20), run(model, IDS[:1], 20), run(model, IDS[1:], 20)
    assert np.array_equal(sight.said[0], sight.said[2]) and not np.array_equal(sight.said[0], sight.said[4])
    assert np.array_equal(sight.said[1], sight.said[3])


def test_threads_have_their_own_texts(model, sight):
    run(model, IDS[:1], 20)
    want = list(sight.said)
    sight.said.clear()
    other = []

    def elsewhere():
        run(model, IDS[1:], 10)
        other.append(sight.own.follower)

    mine = sight.own.follower
    t = threading.Thread(target=elsewhere)
    t.start(), t.join()
    assert other[0] is not mine and sight.own.follower is mine
    sight.said.clear()
    run(model, IDS[:1], 20)
    assert all(np.array_equal(a, b) for a, b in zip(want, sight.said))


def test_nothing_stands_in_the_way(model, taps, sight):
    "Embeddings instead of tokens, a predictor that fails: the model runs on, the problem is named, the next text is predicted."
    good = run(model, IDS[:1])
    with torch.no_grad(): model(inputs_embeds=model.get_input_embeddings()(IDS[:1]))
    n = sight.passes
    sight.own.follower.rows[0].step = lambda *a: (_ for _ in ()).throw(ConfigError("no such token"))
    with torch.no_grad():
        out = run(model, IDS[:1])       # a new text has new predictors
        assert sight.passes == n + 1
        sight.own.follower.rows[0].step = lambda *a: (_ for _ in ()).throw(ConfigError("no such token"))
        model(IDS[:1, :1], past_key_values=out.past_key_values)
    assert sight.passes == n + 1 and sight.problem == "no such token"
    assert torch.equal(run(model, IDS[:1]).logits, good.logits) and sight.passes == n + 2 and not sight.problem


def test_a_pass_that_was_broken_off_tells_nothing(model, sight):
    hook = model.model.layers[4].register_forward_pre_hook(lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        with pytest.raises(KeyboardInterrupt): run(model, IDS[:1])
    finally: hook.remove()
    assert sight.own.follower.seen.known(4) is None
    run(model, IDS[:1], 12)
    assert sight.passes == 3


def test_closed_is_off(model, taps):
    before = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    s = make_sight(shipped_path(PATH), model, taps, PredictedForecast([32] * 8, HORIZONS), None)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] != before
    s.close()
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == before


def test_files(tmp_path):
    ckpt = Checkpoint.open(PATH)
    assert path_file(None, ckpt) == shipped_path(PATH) and path_file("routing", ckpt) is None
    with pytest.raises(CheckpointError): path_file(str(tmp_path / "none.safetensors"), ckpt)
    other = next(f for f in shipped_path(PATH).parent.glob("*.path.safetensors") if f != shipped_path(PATH))
    with pytest.raises(CheckpointError, match=r"another model|made for"): path_file(str(other), ckpt)


def test_together():
    a, b = np.full((1, 1, 2), .5), np.array([[[0., 1.]]])
    assert together([a]) is a and np.allclose(together([a, b]), [[[.5, 1]]])


def test_another_number_of_sequences_is_a_new_text(model, taps):
    net, _ = load_path(shipped_path(PATH), PATH)
    e = model.get_input_embeddings().weight.detach()
    f = Follower(lambda: PathPredictor(net, e), 8, 4)
    one = f.begin(np.array([[5]]), True)
    f.begin(np.array([[5], [6]]), False)
    assert len(f.rows) == 2 and np.array_equal(f.begin(np.array([[5]]), False), one)


# in the runtime

def settings(**more): return {"gpu_memory_budget": "40%", "eviction_policy": "forecast", "context": 256, **more}


def test_the_forecast_policy_uses_it_and_changes_no_bit():
    "Equal tokens and logits with the path predictor, with the routing alone and resident; reported; closed with the model."
    resident = AutoModelForCausalLM.from_pretrained(PATH, dtype="auto", experts_implementation="grouped_mm")
    ask = dict(max_new_tokens=24, do_sample=False, output_logits=True, return_dict_in_generate=True)
    want = resident.generate(IDS[:1], attention_mask=torch.ones_like(IDS[:1]), **ask)
    misses = {}
    for wanted in (None, "routing"):
        with ExpertFlow.from_pretrained("tiny-moe", **settings(forecast_model_path=wanted)) as flow:
            got = flow.model.generate(IDS[:1], attention_mask=torch.ones_like(IDS[:1]), **ask)
            assert torch.equal(got.sequences, want.sequences)
            assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits))
            report = flow.report()
            misses[wanted] = report.cache["misses"]
            if wanted is None:
                assert report.forecast == {"passes": 24, "problem": ""} and "24 passes" in str(report)
                assert flow.ledger.held("device", "resident weights") > flow.plan.dense - 1
                hooks = flow.sight.hooks
            else: assert report.forecast is None and flow.sight is None
        if wanted is None: assert not hooks
    assert misses[None] != misses["routing"]        # it does have a say


def test_it_comes_and_goes_with_the_policy():
    with ExpertFlow.from_pretrained("tiny-moe", **settings(eviction_policy="lru")) as flow:
        assert flow.sight is None
        before = flow.plan.dense
        flow.set(eviction_policy="forecast")
        assert flow.sight is not None and flow.plan.dense > before
        list(flow.stream("The sea", max_new_tokens=4))
        assert flow.sight.passes == 4
        flow.set(forecast_model_path="routing")
        assert flow.sight is None and flow.plan.dense == before
        flow.set(forecast_model_path=None, eviction_policy="lru")
        assert flow.sight is None
        other = next(f for f in shipped_path(PATH).parent.glob("*.path.safetensors") if f != shipped_path(PATH))
        with pytest.raises(CheckpointError): flow.set(eviction_policy="forecast", forecast_model_path=str(other))
        assert flow.config.eviction_policy == "lru" and flow.sight is None


def test_the_first_layers_are_fetched_before_a_pass():
    "With a planner that may always load, experts of layer 0 come before the pass, some in time; and the text is the same."
    texts, named = [], []
    for more in ({}, {"prediction_model_path": "gate", "prediction_lookahead": 2}):
        with ExpertFlow.from_pretrained("tiny-moe", **settings(**more)) as flow:
            if more:
                flow.foresight.planner.guard.slack = float("inf")
                into = flow.runtime.prefetch_into
                flow.runtime.prefetch_into = lambda slot, layer, e, into=into: (named.append((layer, e)), into(slot, layer, e))
            texts.append(flow.generate("The captain looked at the sea", max_new_tokens=30, do_sample=False))
            check(flow.runtime.cache)
    assert texts[0] == texts[1] and any(layer == 0 for layer, _ in named)


def test_a_pass_is_not_told_to_a_closed_model():
    with ExpertFlow.from_pretrained("tiny-moe", **settings(prediction_model_path="gate")) as flow:
        eyes = flow.foresight
        eyes.planner.guard.slack = float("inf")
    before_pass(eyes, np.ones((2, 32)))
    assert not flow.runtime.cache.loading.any()
