"The path predictor: the online form is the network, runs can be resumed, nothing from the future leaks, files know their model."
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from expertflow.bundled import ensure
from expertflow.card import load_card, save_card
from expertflow.checkpoint import Checkpoint
from expertflow.config import CheckpointError, ConfigError
from expertflow.paths import (
    HORIZONS,
    PREDICTORS,
    PathData,
    PathNet,
    PathPredictor,
    PathSpec,
    Training,
    build_path,
    calibrate,
    check_size,
    decayed,
    forget,
    from_trace,
    gather,
    judge_ahead,
    judge_path,
    load_path,
    parameters,
    passed,
    path_loss,
    pieces,
    platt,
    probabilities,
    record,
    shipped_path,
    spread,
    train_path,
)
from expertflow.quality import recall

SMALL = dict(width=12, inner=16, later=6, rank=5)


def made(n=12, length=(3, 40), experts=(6, 4, 6), k=2, hidden=5, vocab=9, seed=0) -> tuple[PathData, torch.Tensor]:
    "Layer 0 follows the token, layer 1 the token before, layer 2 the hidden state of the token before; layers differ in size."
    rng = np.random.default_rng(seed)
    offsets = np.cumsum([0, *rng.integers(*length, n)]); N = offsets[-1]
    tokens = rng.integers(0, vocab, N)
    before = np.r_[0, tokens[:-1]]
    h = rng.standard_normal((N, hidden)).astype(np.float16)
    state = np.r_[0, h[:-1, 0] > 0].astype(int)
    a = lambda x, E: np.stack([x % E, (x + 1) % E], 1)
    ids = np.stack([a(tokens, experts[0]), a(before, experts[1]), a(state * 3, experts[2])], 1)
    w = rng.random(ids.shape); w /= w.sum(-1, keepdims=True)
    data = PathData(ids.astype(np.int16), w.astype(np.float16), offsets, experts, tokens, h)
    return data, torch.randn(vocab, 7, generator=torch.Generator().manual_seed(seed))


def random_net(data, table, seed=0, **sizes):
    "Nothing zero, calibration included."
    torch.manual_seed(seed)
    net = PathNet(PathSpec.of(data, embedding=0 if table is None else table.shape[1], **(SMALL | sizes)))
    with torch.no_grad():
        for p in net.parameters(): p.add_(torch.randn_like(p) * .2)
        net.scale.uniform_(.5, 1.5); net.shift.normal_()
    return net.eval()


# the online form

@pytest.mark.parametrize("tokens, hidden", [(True, True), (True, False), (False, False)])
def test_steps_say_what_the_network_says(tokens, hidden):
    data, table = made(length=(20, 40))
    if not tokens: data, table = replace(data, tokens=None), None
    if not hidden: data = replace(data, hidden=None)
    net = random_net(data, table); p = PathPredictor(net, table)
    for s in (0, 1):
        a, b = data.offsets[s], data.offsets[s + 1]
        want = probabilities(net, data, s, table)
        for i in range(b - a):
            r = slice(a + i - 1, a + i)
            known = (data.ids[r], data.weights[r], None if data.hidden is None else torch.from_numpy(data.hidden[r])) if i else ()
            got = p.step([0] if data.tokens is None else data.tokens[a + i:a + i + 1], *known)
            assert got.shape == (5, 3, 6) and (got[:, 1, 4:] == 0).all(), "a layer of four experts ends in zeros"
            flat = np.concatenate([got[:, 0], got[:, 1, :4], got[:, 2]], 1)
            np.testing.assert_allclose(flat, want[i], atol=2e-5)
            np.testing.assert_allclose(p.each[0], want[i], atol=2e-5)
        p.reset()


@pytest.mark.parametrize("chunks", [(1, 9, 1, 5), (12, 1, 1, 1), (4, 4, 4)])
def test_prompts_in_chunks_end_in_the_same_state(chunks):
    data, table = made(length=(20, 40)); net = random_net(data, table); p = PathPredictor(net, table)
    a = int(data.offsets[2]); at = 0; known = ()
    x, _, _ = gather(data, [(a, 20)], table)
    for n in chunks:
        rows = slice(a + at, a + at + n)
        first = p.step(data.tokens[rows], *known)
        with torch.no_grad(): out = net(forget(x, torch.tensor([at])))
        z = [net.calibrated(y, j).sigmoid()[0].detach().numpy() for j, y in enumerate(out)]
        want = np.stack(z, 1)[at:at + n]
        np.testing.assert_allclose(p.each, want, atol=2e-5)
        union = 1 - np.prod(1 - want[:, 0], 0)
        np.testing.assert_allclose(np.concatenate([first[0, 0], first[0, 1, :4], first[0, 2]]), union, atol=2e-5)
        known = (data.ids[rows], data.weights[rows], data.hidden[rows]); at += n


def test_steps_without_routing_are_like_a_prompt():
    data, table = made(length=(20, 40)); net = random_net(data, table); p = PathPredictor(net, table)
    got = []
    for i in range(10): p.step(data.tokens[i:i + 1]); got.append(p.each[0])
    np.testing.assert_allclose(got, probabilities(net, data, 0, table, prompt=True)[:10], atol=2e-5)
    p.reset(); p.step(data.tokens[:1])
    assert np.array_equal(p.each[0], got[0])


def test_steps_that_do_not_fit_change_nothing():
    data, table = made(length=(20, 40)); p = PathPredictor(random_net(data, table), table)
    p.step(data.tokens[:2])
    i, w, h = data.ids[:2], data.weights[:2], data.hidden[:2]
    for args, word in (((i[:1], w[:1], h[:1]), "had 2 tokens"), ((i, None, h), "weights"), ((i, w), r"hidden states .* \[2, 5\]"),
                       ((i[:, :2], w[:, :2], h), "3, K")):
        with pytest.raises(ConfigError, match=word): p.step(data.tokens[2:3], *args)
    right = (data.ids[:2], data.weights[:2], data.hidden[:2])
    got = p.step(data.tokens[2:3], *right)
    q = PathPredictor(random_net(data, table), table); q.step(data.tokens[:2])
    assert np.array_equal(got, q.step(data.tokens[2:3], *right))
    with pytest.raises(ConfigError, match="token ids from 99"): p.step([99])
    with pytest.raises(ConfigError, match="no tokens"): q.step([], *(x[:1] for x in right))


def test_embeddings_must_fit():
    data, table = made(); net = random_net(data, table)
    with pytest.raises(ConfigError, match="needs the model"): PathPredictor(net, None)
    with pytest.raises(ConfigError, match="width 3"): PathPredictor(net, table[:, :3])
    with pytest.raises(ConfigError, match="uses no embedding"): PathPredictor(random_net(replace(data, tokens=None), None), table)
    with pytest.raises(ConfigError, match="cannot run before"): PathPredictor(random_net(data, None, ahead=True), None)


# inputs

def test_spread_and_decay_by_hand():
    got = spread(torch.tensor([[0, 2], [1, -1]]), torch.tensor([[.3, .7], [1., 9.]]), (3, 2))
    assert torch.allclose(got, torch.tensor([.3, 0, .7, 0, 1.]))
    r = torch.rand(2, 9, 4); m = torch.zeros(2, 4)
    for t, got in enumerate(decayed(r, 3.).unbind(1)):
        m = .5 ** (1 / 3) * m + (1 - .5 ** (1 / 3)) * r[:, t]
        assert torch.allclose(got, m, atol=1e-6)


def test_nothing_leaks_from_the_future():
    data, table = made(length=(30, 40)); net = random_net(data, table)
    at = 10; a = int(data.offsets[1])
    other = replace(data, ids=data.ids.copy(), hidden=data.hidden.copy(), tokens=data.tokens.copy(), weights=data.weights.copy())
    other.ids[a + at:] = 0; other.hidden[a + at:] = 3; other.tokens[a + at + 1:] = 0; other.weights[a + at:] = .5
    one, two = (probabilities(net, d, 1, table) for d in (data, other))
    assert np.allclose(one[:at + 1], two[:at + 1], atol=1e-6) and not np.allclose(one[at + 1:], two[at + 1:])


def test_layers_passed_are_all_that_ahead_sees():
    data, _ = made(length=(30, 40)); net = random_net(data, None, ahead=True)
    other = replace(data, ids=data.ids.copy()); i = int(data.offsets[1]) + 9; other.ids[i, 1:] = (other.ids[i, 1:] + 1) % 4
    see = lambda d, n: net(passed(gather(d, [(int(data.offsets[1]), 20)], None, True)[0], net.spec, torch.tensor(n))[0])[0][0, 9]
    assert torch.equal(see(data, 1), see(other, 1)) and not torch.equal(see(data, 2), see(other, 2))
    _, open_ = passed(gather(data, [(0, 3)], None, True)[0], net.spec, torch.tensor([[0, 1, 2]]))
    assert [o.tolist() for o in open_[0]] == [[True] * 16, [False] * 6 + [True] * 10, [False] * 10 + [True] * 6]


def test_pieces_cover_sequences_and_never_cross_them():
    data, _ = made(length=(1, 60), n=30)
    got = pieces(data, range(30), 16)
    for a, n in got:
        s = np.searchsorted(data.offsets, a, "right") - 1
        assert 2 <= n <= 16 and a + n <= data.offsets[s + 1]
    assert sum(n for _, n in got) >= len(data.ids) - 30


def test_padding_does_not_count():
    data, table = made(length=(8, 30)); net = random_net(data, table); t = Training()
    (a, n), (b, m) = pieces(data, range(4), 64)[:2]
    both = path_loss(net, *gather(data, [(a, n), (b, m)], table), t, 0)
    swapped = data.ids.copy(); assert n != m
    real = gather(data, [(a, n), (b, m)], table)[2]
    assert real.sum() == n + m
    x, used, _ = gather(data, [(a, n), (b, m)], table)
    used[~real] = 1 - used[~real]
    assert torch.equal(both, path_loss(net, x, used, real, t, 0)) and (swapped == data.ids).all()


def test_a_miss_weighs_four_times():
    data, table = made(); net = random_net(data, table)
    x, used, real = gather(data, pieces(data, range(2), 64), table)
    one, four = (path_loss(net, x, used, real, Training(miss=m, further=0), 0) for m in (1, 4))
    z = net(x)[0]; each = torch.nn.functional.softplus(-z) * used
    extra = 3 * (each * real[..., None]).sum() / (real.sum() * z.shape[-1])
    assert torch.allclose(four - one, extra, atol=1e-5)


def test_data_that_does_not_fit():
    data, _ = made()
    for change, word in ((dict(num_experts=(6, 4)), "3 layers"), (dict(tokens=data.tokens[:-1]), "rows"),
                         (dict(offsets=data.offsets[:-1]), "offsets end"), (dict(tokens=data.tokens - 1), "negative")):
        with pytest.raises(ConfigError, match=word): replace(data, **change)
    with pytest.raises(ConfigError, match="without token ids"): gather(replace(data, tokens=None), [(0, 3)], torch.ones(9, 7))


# training

def test_it_learns_what_is_there_and_knows_how_sure_it_is():
    data, table = made(n=80, length=(30, 60), vocab=6)
    spec = PathSpec.of(data, embedding=7, width=24, inner=32, later=8, rank=12)
    net, history = train_path(data, range(64), table, spec, Training(epochs=20, lr=1e-2), progress=False)
    t = judge_path(net, data, range(64, 80), table)
    this = t.pick(horizon=0)
    assert (this["recall"] > [.97, .97, .9]).all() and (this["ece"] < .05).all(), this
    assert t.pick(horizon=1, layer=1).rows[0]["recall"] > .95, "the token about to run is the one before the next"
    assert t.pick(horizon=2, layer=0).rows[0]["recall"] < .6 and (t.pick(horizon=2)["ece"] < .08).all(), "chance, and it knows"
    blind = judge_path(net, data, range(64, 80), table, prompt=True, horizons=[0])
    assert blind.rows[0]["recall"] > .95 and blind.rows[2]["recall"] < .75, "inside a prompt the state is not known"
    assert history[-1]["loss"] < history[0]["loss"] / 2


def test_the_same_seed_and_a_resumed_run_give_the_same_bits(tmp_path):
    data, table = made(n=20); spec = PathSpec.of(data, embedding=7, **SMALL); t = Training(epochs=4, lr=1e-2)
    train = lambda c=None, t=t: train_path(data, range(20), table, spec, t, c, progress=False)
    one, history = train()
    ckpt = tmp_path / "run.pt"
    import expertflow.paths as m
    calls, epoch = [], m.epoch
    def broken(*args):
        if len(calls) == 2: raise KeyboardInterrupt
        calls.append(1); return epoch(*args)
    m.epoch = broken
    try:
        with pytest.raises(KeyboardInterrupt): train(ckpt)
    finally: m.epoch = epoch
    two, again = train(ckpt)
    assert again == history and all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values()))
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]
    three, same = train(ckpt)
    assert same == history and torch.equal(three.bias, one.bias), "a finished run is not run again"
    with pytest.raises(ConfigError, match="other settings"): train(ckpt, replace(t, seed=1))


def test_early_stopping_keeps_the_best():
    data, table = made(n=8, length=(4, 8))
    spec = PathSpec.of(data, embedding=7, **SMALL)
    net, history = train_path(data, range(8), table, spec, Training(epochs=60, patience=2, lr=3e-2), progress=False)
    recalls = [h["recall"] for h in history]
    assert len(history) < 60 and max(recalls[-2:]) <= max(recalls[:-2])
    with pytest.raises(ConfigError, match="too few"): train_path(data, [0], table, net.spec, Training(epochs=1), progress=False)


def test_platt_finds_factor_and_shift_and_survives_certainty():
    g = torch.Generator().manual_seed(1); z = 3 * torch.randn(50_000, generator=g)
    y = (torch.rand(50_000, generator=g) < torch.sigmoid(.4 * z - 2)).float()
    a, b = platt(z, y); assert abs(a - .4) < .02 and abs(b + 2) < .05
    for y in (torch.zeros(100), torch.ones(100)): assert np.isfinite(platt(torch.randn(100), y)).all()
    a, b = platt(torch.tensor([-1., 1.] * 50), torch.tensor([0., 1.] * 50))
    assert np.isfinite([a, b]).all() and a > 1


def test_calibration_repairs_a_wrong_scale():
    data, table = made(n=60, length=(30, 60))
    spec = PathSpec.of(data, embedding=7, **SMALL)
    net, _ = train_path(data, range(48), table, spec, Training(epochs=6, lr=1e-2), progress=False)
    before = judge_path(net, data, range(48, 60), table).mean("layer")
    net.scale.fill_(1); net.shift.fill_(0)
    raw = judge_path(net, data, range(48, 60), table).mean("layer")
    assert (before["recall"] == raw["recall"]).all() and (before["ece"] < raw["ece"] / 2).all()
    calibrate(net, data, pieces(data, range(48), 256), table)
    assert (judge_path(net, data, range(48, 60), table).mean("layer")["ece"] < raw["ece"] / 2).all()


def test_judging_is_counting():
    data, table = made(length=(3, 30)); net = random_net(data, table)
    t = judge_path(net, data, [0, 3], table)
    for h in HORIZONS:
        s, y = [], []
        for q in (0, 3):
            a, b = data.offsets[q], data.offsets[q + 1]; p = probabilities(net, data, q, table)
            for i in range(1, b - a - h): s.append(p[i, HORIZONS.index(h), 6:10]); y.append(data.ids[a + i + h, 1])
        got = t.pick(horizon=h, layer=1).rows[0]
        assert got["rows"] == len(s) and got["recall"] == pytest.approx(recall(np.array(s), np.array(y)))


def test_on_the_way_the_layers_before_help():
    rng = np.random.default_rng(0); N = 1500
    a = rng.integers(0, 8, N); ids = np.stack([a, (a + 3) % 8, (a * 3) % 8], 1)[..., None]
    data = PathData(ids.astype(np.int16), np.ones(ids.shape, np.float16), np.arange(0, N + 1, 50), (8, 8, 8))
    spec = PathSpec.of(data, ahead=True, width=8, inner=64, later=4, rank=4)
    net, _ = train_path(data, range(24), None, spec, Training(epochs=25, lr=1e-2, patience=25), progress=False)
    t = judge_ahead(net, data, range(24, 30), distances=(1, 2))
    assert {(r["distance"], r["layer"]) for r in t.rows} == {(1, 1), (1, 2), (2, 2)} and (t["recall"] > .9).all(), t
    before = judge_path(net, data, range(24, 30), None).pick(horizon=0)
    assert before["recall"].max() < .4, "random tokens: nothing to know before the first layer"


# files and real models

@pytest.fixture(scope="module")
def tiny():
    from transformers import AutoModelForCausalLM
    folder = ensure("tiny-moe")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval(), folder


def test_recording_is_what_the_routers_did(tiny):
    model, _ = tiny
    text = torch.randint(1, 4000, (5, 12), generator=torch.Generator().manual_seed(0))
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    before = hooks()
    data = record(model, text, batch=2)
    assert hooks() == before
    with torch.no_grad(): out = model(text[:2], output_router_logits=True, output_hidden_states=True)
    for layer, logits in enumerate(out.router_logits):
        want = logits.reshape(24, 32).float().softmax(-1).topk(4)[1].sort(-1)[0]
        assert np.array_equal(np.sort(data.ids[:24, layer], -1), want.numpy())
    assert np.array_equal(data.hidden[:24], out.hidden_states[-1].reshape(24, -1).half().numpy())
    assert np.array_equal(data.tokens, text.flatten().numpy()) and data.offsets.tolist() == [0, 12, 24, 36, 48, 60]


def test_build_save_and_load(tiny, tmp_path):
    model, folder = tiny
    text = torch.randint(1, 4000, (10, 24), generator=torch.Generator().manual_seed(0))
    file = tmp_path / "p.safetensors"
    table = build_path(model, folder, text, file, held_out=2, training=Training(epochs=1), progress=False, inner=66)
    net, card = load_path(file, folder)
    assert card["data"] == {"sequences": 8, "tokens": 192} and card["model"] == Checkpoint.open(folder).fingerprint()
    assert card["held_out"][0]["recall"] == pytest.approx(table.pick(horizon=0)["recall"].mean(), abs=1e-3)
    assert card["parameters"] == parameters(net) and .001 < card["share"] < .01
    tensors, _ = load_card(file, "path")
    assert tensors["out_this.weight"].dtype == torch.bfloat16 and tensors["scale"].dtype == torch.float32
    with pytest.raises(ConfigError, match="take 7,244 to 72,444"):
        build_path(model, folder, text, file, held_out=2, training=Training(epochs=1), progress=False, inner=400)
    assert load_path(file, folder)[1] == card, "a refused size leaves the old file"
    save_card(file, tensors, card | {"horizons": [0]})
    with pytest.raises(ConfigError, match="horizons"): load_path(file)


def test_another_models_predictor_is_refused(tiny, tmp_path):
    from expertflow.testing import write_checkpoint
    other = write_checkpoint("qwen3_moe", tmp_path / "other")
    file = shipped_path(tiny[1])
    with pytest.raises(CheckpointError, match=r"\(tiny-moe\), not for"): load_path(file, other)
    assert shipped_path(other) is None


@pytest.mark.parametrize("file", sorted(PREDICTORS.glob("*.path.safetensors")), ids=lambda f: f.name)
def test_shipped_predictors(file):
    net, card = load_path(file)
    assert parameters(net) == card["parameters"] and .001 <= card["share"] <= .01
    assert file.stat().st_size < 3_000_000 and card["held_out"][0]["ece"] <= .03
    if card["name"] == "tiny-moe":
        assert load_path(file, ensure("tiny-moe"))
        check_size(net, Checkpoint.open(ensure("tiny-moe")))
    json.dumps(card)


def test_the_shipped_predictor_knows_what_tiny_moe_writes(tiny):
    model, folder = tiny
    torch.manual_seed(5)
    start = torch.randint(1, 4000, (12, 4))
    text = model.generate(start, attention_mask=torch.ones_like(start), do_sample=True, min_new_tokens=60, max_new_tokens=60)
    data = record(model, text)
    net, _ = load_path(shipped_path(folder), folder)
    t = judge_path(net, data, range(12), model.get_input_embeddings().weight.detach()).mean("layer")
    assert t["recall"][0] > .6 and t["ece"][0] < .04 and (t["recall"][1:] > .2).all(), t


def test_traces_become_data(tmp_path):
    from expertflow.trace import TraceWriter, load_trace
    with TraceWriter(tmp_path / "t", (6, 4), 2) as w:
        for step in range(6):
            w.append(np.array([[[step % 6, -1], [0, 1]]]), np.array([[[1, 0], [.5, .5]]]), tokens=step + 1, sequence=step % 2)
    data = from_trace(load_trace(tmp_path / "t"))
    assert data.offsets.tolist() == [0, 3, 6] and data.tokens.tolist() == [1, 3, 5, 2, 4, 6]
    assert data.ids[:, 0].tolist() == [[i, -1] for i in (0, 2, 4, 1, 3, 5)] and data.num_experts == (6, 4)
    assert data.weights[0].tolist() == [[1, 0], [.5, .5]] and data.hidden is None
