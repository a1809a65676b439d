"Metrics against brute force, edge cases, and baselines on routing whose answer is known."
import numpy as np
import pytest

from expertflow.config import ConfigError
from expertflow.quality import (
    BASELINES,
    Adversary,
    Baseline,
    CoOccurrence,
    Decayed,
    Oracle,
    PreviousToken,
    Random,
    Routes,
    Table,
    TokenTable,
    as_mask,
    bootstrap,
    calibration_curve,
    calibration_error,
    compare,
    exact,
    hits,
    hold_out,
    judge,
    precision,
    ranked,
    recall,
    rows_of,
)

def distinct(rng, n, k, experts):
    "[n, k] different ids per row."
    return np.stack([rng.permutation(experts)[:k] for _ in range(n)])


@pytest.mark.parametrize("seed", range(12))
def test_metrics_are_what_counting_says(seed):
    rng = np.random.default_rng(seed)
    E = int(rng.integers(1, 12)); k = int(rng.integers(1, E + 1)); N = int(rng.integers(1, 20))
    scores = rng.integers(0, 4, (N, E)) / 4.0           # many ties
    truth = distinct(rng, N, k, E)
    for n in range(1, E + 3):
        r, p, x = [], [], []
        for row, t in zip(scores, truth):
            first = sorted(range(E), key=lambda e: (-row[e], e))[:n]
            got = len(set(first) & set(t.tolist()))
            r.append(got / k); p.append(got / min(n, E)); x.append(got == k)
        assert recall(scores, truth, n) == pytest.approx(np.mean(r))
        assert precision(scores, truth, n) == pytest.approx(np.mean(p))
        assert exact(scores, truth, n) == pytest.approx(np.mean(x))
    j = judge(scores, truth, extra=1)
    assert j["recall"] == pytest.approx(recall(scores, truth)) == pytest.approx(precision(scores, truth, k))
    assert j["recall_n"] == pytest.approx(recall(scores, truth, k + 1)) and j["n"] == min(k + 1, E)
    assert j["precision_n"] == pytest.approx(precision(scores, truth, k + 1))
    assert j["exact"] == pytest.approx(exact(scores, truth))


@pytest.mark.parametrize("seed", range(6))
def test_calibration_error_is_what_counting_says(seed):
    rng = np.random.default_rng(seed)
    p = rng.random((30, 6)); p[0] = [0, 1, .2, .4, .6, .8]; truth = distinct(rng, 30, 2, 6)
    for c in (None, 1, 4, 6):
        pairs = []
        for row, t in zip(p, truth):
            first = sorted(range(6), key=lambda e: (-row[e], e))[:c]
            pairs += [(row[e], float(e in t)) for e in first]
        want = 0.0
        for b in range(5):
            inside = [x for x in pairs if (b / 5 <= x[0] < (b + 1) / 5) or (b == 4 and x[0] == 1)]
            if inside: want += abs(sum(x[0] - x[1] for x in inside)) / len(pairs)
        assert calibration_error(p, truth, bins=5, candidates=c) == pytest.approx(want)
        assert calibration_curve(p, truth, 5, c)[:, 2].sum() == len(pairs)


def test_all_experts_chosen_is_easy():
    truth = np.tile(np.arange(4), (3, 1))
    j = judge(np.zeros((3, 4)), truth)
    assert (j["recall"], j["exact"], j["n"], j["precision_n"]) == (1, 1, 4, 1) and j["ece"] == 1


def test_ties_go_to_the_lower_id_and_minus_one_is_nobody():
    assert ranked(np.zeros((1, 40)))[0].tolist() == list(range(40))
    assert recall(np.zeros((1, 4)), np.array([[0, 3]])) == .5
    assert as_mask(np.array([[2, -1, -1]]), 3).tolist() == [[False, False, True]]
    both = judge(np.array([[.9, .1, 0], [.9, .1, 0]]), np.array([[0, -1], [-1, -1]]))
    assert both["rows"] == 1 and both["recall"] == 1, "a row without an expert is left out"
    assert np.isnan(recall(np.zeros((1, 3)), np.array([[-1]]))) and np.isnan(precision(np.zeros((1, 3)), np.array([[-1]]), 1))
    assert np.isnan(exact(np.zeros((1, 3)), np.array([[-1]])))


def test_masks_and_ids_are_the_same_truth():
    rng = np.random.default_rng(0)
    s, t = rng.random((9, 7)), distinct(rng, 9, 3, 7)
    assert judge(s, t) == judge(s, as_mask(t, 7))
    f, k = hits(s, t)
    assert (f[:, -1] == k).all() and (np.diff(f, axis=1) >= 0).all()


@pytest.mark.parametrize("call, word", [
    (lambda: as_mask(np.array([[5]]), 4), "layer of 4 experts"),
    (lambda: as_mask(np.array([[-2]]), 4), "from -2"),
    (lambda: as_mask(np.array([1, 2]), 4), r"give \[N, K\]"),
    (lambda: as_mask(np.zeros((2, 3), bool), 4), r"\[N, 4\]"),
    (lambda: hits(np.zeros((2, 4)), np.zeros((3, 1), int)), "2 rows of scores for 3"),
    (lambda: ranked(np.array([[np.nan, 1.]])), "NaN"),
    (lambda: calibration_error(np.array([[2., 0.]]), np.array([[0]])), "ranked"),
    (lambda: judge(np.zeros((1, 4)), np.array([[-1]])), "nothing to judge"),
    (lambda: Routes(np.zeros((3, 2, 1), int), [4], np.zeros(3, int)), "2 layers"),
    (lambda: Routes(np.zeros((3, 1, 1), int), [4], np.zeros(2, int)), "one row per token"),
    (lambda: Routes(np.zeros((3, 1, 1), int), [4], np.array([0, 1, 0])), "stand together"),
])
def test_errors_say_what_is_wrong(call, word):
    with pytest.raises(ConfigError, match=word): call()


def test_scores_that_are_no_probabilities_are_ranked_but_not_calibrated():
    j = judge(np.array([[3., -1., 0.]]), np.array([[0]]))
    assert j["recall"] == 1 and "ece" not in j


def test_interval_contains_the_mean_and_knows_sequences():
    rng = np.random.default_rng(0)
    level = rng.random(40)                              # sequences differ, tokens of one are all alike
    values = np.repeat(level, 100); seq = np.repeat(np.arange(40), 100)
    lo, hi = bootstrap(values, seq)
    assert lo < values.mean() < hi
    naive = bootstrap(values, np.arange(len(values)))
    assert hi - lo > 5 * (naive[1] - naive[0]), "tokens of one sequence are not independent"
    assert bootstrap(np.ones(5), np.zeros(5))[0] == 1


def test_table_averages_prints_and_gives_away():
    t = Table()
    for layer, r in enumerate((.5, .7)):
        t.add({"rows": 10, "recall": r, "low": 0., "ece": .1 * layer}, predictor="p", layer=layer)
    t.add({"rows": 10, "recall": .9}, predictor="q", layer=0)
    m = t.mean("layer")
    assert m.pick(predictor="p")["recall"] == pytest.approx([.6]) and len(m) == 2 and "low" not in m.rows[0]
    assert "ece" not in m.pick(predictor="q").rows[0] and np.isnan(m["ece"][1])
    assert str(t).splitlines()[0].split() == ["predictor", "layer", "rows", "recall", "low", "ece"]
    t.as_dict()[0]["recall"] = 0; assert t.rows[0]["recall"] == .5
    assert str(Table()) == "(empty table)"


# baselines

def made(n_seq=30, length=40, experts=(8, 5), k=(2, 1), seed=0, vocab=6):
    "Layer 0 depends on the token id, layer 1 on layer 0's first expert, tokens follow a fixed cycle with noise."
    rng = np.random.default_rng(seed)
    seq = np.repeat(np.arange(n_seq), length)
    tokens = rng.integers(0, vocab, len(seq))
    a = np.stack([tokens, (tokens + 1) % experts[0]], 1)
    b = (a[:, :1] * 2) % experts[1]
    return Routes([a, b], experts, seq, tokens)


def test_baselines_find_what_is_there():
    r = made(); fit, held = hold_out(r.seq)
    assert not set(fit) & set(held) and len(fit) + len(held) == 30
    train, test = r.of(fit), r.of(held)
    t = compare([b().fit(train) for b in BASELINES], test, distances=[1], horizons=[0, 1])
    got = lambda name, **ask: t.pick(predictor=name, **ask).rows[0]["recall"]
    assert got("token table", horizon=0, layer=0) == 1 and got("token table", horizon=0, layer=1) == 1
    assert got("token table", horizon=1, layer=0) < .6, "the tokens are random: nothing to know about the next"
    assert got("co-occurrence", distance=1, layer=1) > .85
    assert len(t.pick(distance=1, layer=0)) == 0


def test_probabilities_sum_to_about_k_and_judge_well_calibrated():
    r = made(); fit, held = hold_out(r.seq)
    for b in BASELINES:
        p = b().fit(r.of(fit))
        for ask in ({"horizon": 0}, {"horizon": 2}):
            s = p.scores(r.of(held), 0, **ask)
            assert s.min() >= 0 and s.max() <= 1 and abs(s.sum(1).mean() - 2) < .25, (b, s.sum(1).mean())


def test_previous_token_reuses_first():
    ids = np.array([[[0]], [[3]], [[3]], [[1]], [[1]], [[1]]])
    r = Routes(ids, [5], np.zeros(6, int)); p = PreviousToken().fit(r)
    s = p.scores(r, 0, horizon=0)
    assert ranked(s)[:, 0].tolist() == [0, 3, 3, 1, 1]
    assert p.reuse(0, 0) == pytest.approx(3 / 5)


def test_decayed_frequency_is_the_loop():
    r = made(n_seq=3, length=7, seed=3); p = Decayed(half_life=2.).fit(r)
    want = []
    for s in range(3):
        now = p.usual[0].copy()
        for i in np.flatnonzero(r.seq == s):
            if i in rows_of(r, 0, horizon=0)[0]: want.append(now.copy())
            now = now * .5 ** .5 + (1 - .5 ** .5) * r.mask(0)[i]
    np.testing.assert_allclose(p.scores(r, 0, horizon=0), want, rtol=1e-5)


@pytest.mark.parametrize("ask", [{"distance": 1}, {"horizon": 0}, {"horizon": 3}])
def test_cooccurrence_is_the_loop(ask):
    r = made(n_seq=4, length=9, seed=1); p = CoOccurrence().fit(r)
    counts, seen = np.zeros((8 if "distance" in ask else 5, 5)), np.zeros(8 if "distance" in ask else 5)
    h = ask.get("horizon", 0)
    for i in range(len(r)):
        if i == 0 or r.seq[i - 1] != r.seq[i] or i + h >= len(r) or r.seq[i + h] != r.seq[i]: continue
        for a in (r.ids[0][i] if "distance" in ask else r.ids[1][i - 1]):
            seen[a] += 1
            for b in r.ids[1][i + h]: counts[a, b] += 1
    np.testing.assert_allclose(p.count(1, ask.get("distance"), ask.get("horizon")), (counts + p.usual[1]) / (seen + 1)[:, None])


def test_token_table_without_ids_says_so():
    r = made(); r2 = Routes(r.ids, r.num_experts, r.seq)
    with pytest.raises(ConfigError, match="without them"): TokenTable().fit(r2).scores(r2, 0, horizon=0)
    unseen = Routes(r.ids, r.num_experts, r.seq, r.tokens + 100)
    p = TokenTable().fit(r)
    assert np.allclose(p.scores(unseen, 0, horizon=0), p.usual[0]), "unknown ids get the usual"


def test_a_future_never_leaks():
    "Scores of a row stay the same if everything that it must not know is replaced."
    r = made(n_seq=2, length=12, seed=5); at = 6
    for ask in ({"horizon": 0}, {"horizon": 2}, {"distance": 1}):
        other = [x.copy() for x in r.ids]
        if "horizon" in ask: other[0][at:12] = (other[0][at:12] + 3) % 8
        other[1][at:12] = (other[1][at:12] + 1) % 5
        tokens = r.tokens.copy(); tokens[at + 1:12] = 0
        changed = Routes(other, r.num_experts, r.seq, tokens)
        for b in BASELINES:
            p = b().fit(r); rows, _ = rows_of(r, 1, **ask); i = rows.tolist().index(at)
            assert np.array_equal(p.scores(r, 1, **ask)[i], p.scores(changed, 1, **ask)[i]), (b.name, ask)


def test_oracle_and_adversary_are_the_ends():
    r = made()
    t = compare([Oracle().fit(r), Adversary().fit(r), Random().fit(r)], r, distances=[1], horizons=[0, 4], intervals=True)
    assert (t.pick(predictor="oracle")["recall"] == 1).all() and (t.pick(predictor="adversary")["recall"] == 0).all()
    assert (t.pick(predictor="oracle")["ece"] == 0).all() and (t.pick(predictor="adversary")["ece"] == 1).all()
    mid = t.pick(predictor="random", layer=0, horizon=0).rows[0]
    assert abs(mid["recall"] - .25) < .05 and mid["low"] <= mid["recall"] <= mid["high"]


def test_one_token_and_empty():
    one = Routes(np.zeros((1, 2, 1), int), [3, 3], np.array([7]), np.array([1]))
    for b in BASELINES:
        assert b().fit(one).scores(one, 1, horizon=0).shape == (0, 3), "nothing before it, so nothing is asked"
    two = Routes(np.zeros((2, 2, 1), int), [3, 3], np.array([7, 7]), np.array([1, 1]))
    for b in BASELINES:
        assert b().fit(two).scores(two, 1, distance=1).shape == (1, 3)
        assert b().fit(two).scores(two, 1, horizon=5).shape == (0, 3)
    assert isinstance(Baseline().fit(one.of([])).usual[0], np.ndarray)


def test_questions_that_make_no_sense():
    r = made()
    for ask, word in (({}, "one of the two"), ({"distance": 1, "horizon": 1}, "one of the two"),
                      ({"distance": 2}, "no layer 2 before"),
                      ({"distance": 0}, "no layer 0 before"), ({"horizon": -1}, "past")):
        with pytest.raises(ConfigError, match=word): rows_of(r, 1, **ask)


def test_real_routes_of_a_large_model(shared):
    z = np.load(shared / "data/routing/gpt-oss-20b/gpt_oss_20b_decode.npz")
    off = z["offsets"][:101]; n = off[-1]
    r = Routes(z["experts"][:n], [32] * 24, np.repeat(np.arange(100), np.diff(off)))
    fit, held = hold_out(r.seq)
    fitted = [b().fit(r.of(fit)) for b in (Baseline, PreviousToken, CoOccurrence)]
    t = compare(fitted, r.of(held), distances=[1], layers=[12]).mean("layer")
    freq, prev, co = t["recall"]
    assert .2 < freq < min(prev, co) and max(prev, co) < .7
