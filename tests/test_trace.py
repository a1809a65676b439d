"""The trace format: round trips, damage of every kind, foreign files line by line; statistics against slow and obvious code."""

import itertools
import json
import shutil
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertflow.config import TraceError
from expertflow.trace import (
    Trace,
    TraceWriter,
    activation_share,
    activations,
    cold_experts,
    columns,
    distinct_experts,
    entropy,
    from_bf16,
    import_trace,
    load_trace,
    mutual_information,
    next_token_reuse,
    reuse_distances,
    row_bytes,
    save_trace,
    statistics,
    statistics_table,
    to_bf16,
    top_choice,
    verify,
)

def made_up(rng, experts=(8, 8, 8), k=(2, 2, 2), passes=12, batch=3, hidden=0):
    "A trace in memory: sequences of a batch decode together, each with a prompt; now and then a layer does not route a token."
    L, K, rows = len(experts), max(k), []
    seq, step = 0, 0
    while step < passes:
        B = int(rng.integers(1, batch + 1))
        rows += [(seq + b, step, False) for b in range(B) for _ in range(rng.integers(1, 6))]
        step += 1
        for _ in range(int(rng.integers(0, 5))):
            rows += [(seq + b, step, True) for b in range(B)]
            step += 1
        seq += B
    T = len(rows)
    dtype = columns(experts, K)["ids"][0]
    ids = np.full((T, L, K), np.iinfo(dtype).max, dtype)
    for layer, (E, kk) in enumerate(zip(experts, k, strict=True)):
        ids[:, layer, :kk] = np.argsort(rng.random((T, E)), 1)[:, :kk]
    ids[rng.random((T, L)) < 0.02] = np.iinfo(dtype).max
    weights = np.where(ids == np.iinfo(dtype).max, 0, rng.random((T, L, K))).astype(np.float16)
    s, p, d = (np.array(x) for x in zip(*rows, strict=True))
    begins = np.zeros(T, bool)
    begins[np.unique(s, return_index=True)[1]] = True
    return Trace(ids, weights, rng.integers(-1, 1000, T).astype(np.int32), (d | begins << 1).astype(np.uint8), p.astype(np.int32),
                 s.astype(np.int32), tuple(experts), rng.integers(0, 2**16, (T, L, hidden)).astype(np.uint16) if hidden else None,
                 [None] * seq, {"model": "m"})  # fmt: skip


def same(a, b):
    for name in ("ids", "weights", "tokens", "flags", "step", "sequence", "hidden"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype.kind == "f"), name
    assert a.num_experts == b.num_experts and a.about == b.about and a.labels == b.labels
    return True


@pytest.fixture
def trace():
    return made_up(np.random.default_rng(0))


@pytest.fixture
def folder(trace, tmp_path):
    return save_trace(trace, tmp_path / "t")


# round trips

shapes = st.lists(st.tuples(st.sampled_from([1, 2, 8, 255, 256, 300, 65535]), st.integers(1, 4)), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(0, 2**32), st.sampled_from([0, 1, 5]), st.integers(1, 40))
def test_round_trip(tmp_path_factory, shape, seed, hidden, block):
    "Layers of different widths and top-k, ids of one and two bytes, with and without states, in blocks of any size."
    experts, k = zip(*((E, min(E, kk)) for E, kk in shape), strict=True)
    t = made_up(np.random.default_rng(seed), experts, k, hidden=hidden)
    t.labels = [{"n": i} if i % 2 else None for i in range(len(t.labels))]
    where = save_trace(t, tmp_path_factory.mktemp("x") / "t", block)
    verify(where)
    back = load_trace(where)
    assert same(t, back)
    assert [p.step.tolist() for p in back.passes()] == [p.step.tolist() for p in t.passes()]
    for i, s in enumerate(back.sequences()):
        assert (s.sequence == i).all() and np.array_equal(s.ids, t.ids[t.sequence == i])


def test_a_part_is_saved_with_its_own_numbers(trace, tmp_path):
    trace.labels = list(range(len(trace.labels)))
    part = trace[np.flatnonzero(trace.sequence >= 2)]
    back = load_trace(save_trace(part, tmp_path / "p"))
    assert back.sequence.min() == back.step.min() == 0 and np.array_equal(back.ids, part.ids)
    assert back.labels == trace.labels[2:] and len(list(back.passes())) == len(list(part.passes()))


def test_unknown_weights_stay_unknown(tmp_path):
    with TraceWriter(tmp_path / "t", [4], 2) as w: w.append([[[0, 3]], [[1, -1]]])
    t = load_trace(tmp_path / "t")
    assert np.isnan(t.weights[0]).all() and t.ids.tolist() == [[[0, 3]], [[1, 255]]]


def test_bfloat16_as_torch_rounds():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal(10000) * 10.0 ** rng.integers(-40, 38, 10000),
                        [0, -0.0, np.inf, -np.inf, 3.4e38, 1.00390625, 1.01171875, 1e-45]]).astype(np.float32)  # fmt: skip
    want = torch.from_numpy(x).bfloat16()
    assert np.array_equal(to_bf16(x), want.view(torch.uint16).numpy()) and np.isnan(from_bf16(to_bf16(np.float32([np.nan]))))[0]
    assert np.array_equal(from_bf16(to_bf16(x)), want.float().numpy())


# streaming

def test_memory_stays_flat_while_writing(tmp_path):
    "A hundred times the tokens, the same memory; and reading a few tokens reads no more."
    def peak(n):
        ids = np.zeros((512, 16, 8), np.int64)
        hidden = np.zeros((512, 16, 64), np.uint16)
        tracemalloc.start()
        with TraceWriter(tmp_path / str(n), [64] * 16, 8, hidden=64) as w:
            for _ in range(n): w.append(ids, hidden=hidden)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    few, many = peak(2), peak(200)
    assert many < 1.2 * few + 100_000
    tracemalloc.start()
    t = load_trace(tmp_path / "200")
    assert len(t) == 102400 and t[50000:50010].hidden.shape == (10, 16, 64)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


# damage

def test_a_recording_that_was_never_closed(tmp_path):
    "Refused, with how to get at what is whole: cut at any byte, the complete tokens come back."
    t = made_up(np.random.default_rng(3), (8, 300), (2, 1), hidden=3)
    w = TraceWriter(tmp_path / "t", t.num_experts, [2, 1], 3)
    for p in t.passes():
        w.append(p.ids, p.weights, tokens=p.tokens, decode=p.decode, sequence=p.sequence, hidden=p.hidden)
    for f in w.files.values(): f.flush()
    with pytest.raises(TraceError, match=f"never closed; its {len(t)} complete tokens can be had with partial=True"):
        load_trace(tmp_path / "t")
    rows = row_bytes(w.columns)
    for name in rows:
        n = rows[name]
        for cut in (0, 1, n - 1, n, n + 1, 7 * n + n // 2, (len(t) - 1) * n):
            other = tmp_path / "copy"
            shutil.copytree(tmp_path / "t", other)
            with open(other / f"{name}.bin", "r+b") as f: f.truncate(cut)
            got = load_trace(other, partial=True)
            whole = cut // rows[name]
            assert len(got) == whole and np.array_equal(got.ids, t.ids[:whole]) and np.array_equal(got.hidden, t.hidden[:whole])
            assert len(got.labels) == len(np.unique(t.sequence[:whole])) == len(list(got.sequences()))
            shutil.rmtree(other)
    w.close()
    assert len(load_trace(tmp_path / "t")) == len(t)


def test_a_damaged_copy_is_found(trace, folder):
    "Truncated or longer by anything: by its size; otherwise by its checksum."
    for file in sorted(folder.glob("*.bin")):
        data = file.read_bytes()
        for bad in (b"", data[:-1], data[:1], data[: len(data) // 2], data + b"\0"):
            file.write_bytes(bad)
            sizes = f"{len(bad)} bytes, but {len(trace)} tokens have {len(data)}"
            with pytest.raises(TraceError, match=rf"{file.name}: {sizes}.*partial=True"): load_trace(folder)
        assert len(load_trace(folder, partial=True)) == len(trace)  # the longer one has all tokens
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 16
        file.write_bytes(flipped)
        load_trace(folder)
        with pytest.raises(TraceError, match=f"{file.name}: not what was written"): verify(folder)
        file.unlink()
        with pytest.raises(TraceError, match=f"{file.name}.*copy the whole folder"): load_trace(folder)
        file.write_bytes(data)
    verify(folder)


@pytest.mark.parametrize("change, message", [
    ({"format": "something"}, "'format' should be 'expertflow trace'"),
    ({"version": 2}, "version 2 .* use a newer one"),
    ({"version": None}, "version None"),
    ({"num_experts": [8, 8]}, "one number .* for each of the 2 layers"),
    ({"num_experts": []}, "one number for each MoE layer"),
    ({"num_experts": [8, 8, 10**9]}, "from 1 to 65535"),
    ({"num_experts": "8"}, "'num_experts' is missing or wrong"),
    ({"num_experts": [8, 8, True]}, "'num_experts'"),
    ({"top_k": [2, 2, 0]}, "top_k"),
    ({"top_k": None}, "'top_k'"),
    ({"tokens": -1}, "'tokens' is missing or wrong"),
    ({"tokens": 10**18}, "do not add up"),
    ({"sequences": [{"length": 1}]}, "do not add up"),
    ({"sequences": [1]}, "'sequences'"),
    ({"sequences": None}, "do not add up"),
    ({"hidden": {"size": "x"}}, "'hidden'"),
    ({"hidden": {"size": 4, "dtype": "bfloat16"}}, "hidden.bin.*cannot be read"),
    ({"complete": 1}, "'complete'"),
    ({"files": [1]}, "'files'"),
    ({"about": None}, "'about'"),
])  # fmt: skip
def test_a_wrong_table_of_contents(change, message, folder):
    file = folder / "trace.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(TraceError, match=message): load_trace(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"format": "expertflow trace"}', "\x00\x01", "{'a': 1}"])
def test_no_table_of_contents(text, folder):
    (folder / "trace.json").write_text(text)
    with pytest.raises(TraceError, match=r"trace\.json"): load_trace(folder)


def test_trace_json_cut_anywhere(folder):
    text = (folder / "trace.json").read_bytes()
    for n in range(0, len(text) - 2, 7):
        (folder / "trace.json").write_bytes(text[:n])
        with pytest.raises(TraceError, match=r"trace\.json"): load_trace(folder)


def test_what_is_no_trace(tmp_path):
    for path, message in ((tmp_path, "no trace.json"), (tmp_path / "nothing", "no trace.json")):
        with pytest.raises(TraceError, match=message): load_trace(path)
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(TraceError, match=r"a \.txt file; .*from .npz and .csv"): load_trace(tmp_path / "x.txt")
    with pytest.raises(TraceError, match="no such file"): import_trace(tmp_path / "y.csv")


# writing

def test_what_the_writer_refuses(tmp_path):
    with pytest.raises(TraceError, match="for each MoE layer"): TraceWriter(tmp_path / "a", [], 2)
    with pytest.raises(TraceError, match="65535"): TraceWriter(tmp_path / "a", [70000], 2)
    with pytest.raises(TraceError, match="top_k"): TraceWriter(tmp_path / "a", [8, 8], [2])
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="cannot be written"): TraceWriter(tmp_path / "file", [8], 2)
    assert not (tmp_path / "a").exists()
    ok = np.array([[[0, 1], [2, 3]]])
    with TraceWriter(tmp_path / "t", [8, 4], 2) as w:
        w.append(ok)
        with pytest.raises(TraceError, match="holds a trace already"): TraceWriter(tmp_path / "t", [8], 2)
        for bad, message in (
            ([[[0, 1], [2, 4]]], "token 1, MoE layer 1: expert 4, but the layer has 4"),
            ([[[0, 10**12], [2, 3]]], "token 1, MoE layer 0: expert 1000000000000"),
            ([[[0, 1], [2, 3]], [[-2, 1], [2, 3]]], "token 2, MoE layer 0: expert -2"),
            ([[[0.0, 1], [2, 3]]], "ids are float64"),
            ([[[0, 1]]], r"integers \[tokens, 2, k\]"),
            ([[[0, 1, 2], [0, 1, 2]]], "ids of shape"),
        ):  # fmt: skip
            with pytest.raises(TraceError, match=message): w.append(bad)
        with pytest.raises(TraceError, match="no hidden states"): w.append(ok, hidden=np.zeros((1, 2, 4), np.uint16))
        with pytest.raises(TraceError, match="they must ascend"): w.append(ok, step=[-1])
        with pytest.raises(TraceError, match="count from 0 up"): w.append(ok, sequence=2)
        with pytest.raises(TraceError, match="weights of shape"): w.append(ok, weights=np.zeros((1, 2, 3)))
        w.append(ok, sequence=1)
    with pytest.raises(TraceError, match="has been closed"): w.append(ok)
    assert load_trace(tmp_path / "t").ids.tolist() == [*ok.tolist(), *ok.tolist()]  # nothing of what was refused


def test_an_error_in_the_with_block_keeps_what_was_written(tmp_path):
    with pytest.raises(ZeroDivisionError), TraceWriter(tmp_path / "t", [8], 2) as w:
        w.append([[[0, 1]]])
        w.append([[[1, 0 // 0]]])
    verify(tmp_path / "t")
    assert len(load_trace(tmp_path / "t")) == 1


# import

def test_gpt_oss(shared, tmp_path):
    source = shared / "data/routing/gpt-oss-20b/gpt_oss_20b_decode.npz"
    t = import_trace(source, tmp_path / "t")
    with np.load(source) as z:
        assert np.array_equal(t.ids, z["experts"]) and np.array_equal(t.weights, z["weights"])
        assert np.array_equal(np.flatnonzero(t.flags & 2), z["offsets"][:-1])
    verify(tmp_path / "t")
    assert t.num_experts == (32,) * 24 and t.labels[1]["category"] == "fact_checking" and t.decode.all()
    size = sum(f.stat().st_size for f in (tmp_path / "t").iterdir())
    assert size < 1.02 * 301 * len(t)


def test_route_trace(shared):
    t = import_trace(shared / "data/routing/route-trace-v1/qwen3-30b-a3b.route.csv")
    assert t.ids.shape == (156, 48, 6) and t.num_experts == (128,) * 48 and len(list(t.sequences())) == 1
    assert t.ids[0, 0].tolist() == [49, 19, 58, 29, 16, 70] and t.weights[0, 0, 0] == np.float16(0.221297)
    assert [len(p) for p in t.passes()] == [28] + [1] * 128 and t.decode.tolist() == [False] * 28 + [True] * 128
    none = (t.ids == t.pad).all(2)
    assert none[:27, 47].all() and none.sum() == 27  # the last layer routed only the last token of the prompt
    assert t.about["expert_bytes"][6] == 2654208


ROUTE = """# route_trace v1
# model=x.gguf arch=a n_layer=2 n_expert=4 n_expert_used=2
# layer=1 expert_bytes=10 dense_bytes=5
# layer=3 expert_bytes=20 dense_bytes=5
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,1,0,3,0.5,0,10
0,0,0,1,1,0,0.25,0,10
0,0,1,1,0,1,nan,0,10
0,0,1,1,1,2,0.25,0,10
0,0,1,3,0,1,0.5,0,10
0,0,1,3,1,2,0.25,0,10
0,1,2,1,1,2,0.25,0,10
0,1,2,1,0,1,0.75,0,10
0,1,2,3,0,1,0.5,0,10
0,1,2,3,1,2,0.25,0,10
1,0,0,1,0,1,0.5,0,10
1,0,0,1,1,2,0.25,0,10
1,0,0,3,0,1,0.5,0,10
1,0,0,3,1,2,0.25,0,10
"""


def test_route_trace_by_hand(tmp_path):
    f = tmp_path / "r.csv"
    f.write_text(ROUTE)
    t = import_trace(f)
    assert t.ids[:, 0].tolist() == [[3, 0], [1, 2], [1, 2], [1, 2]] and t.ids[0, 1].tolist() == [255, 255]
    assert np.isnan(t.weights[1, 0, 0]) and t.weights[2, 0].tolist() == [0.75, 0.25]
    assert t.step.tolist() == [0, 0, 1, 2] and t.sequence.tolist() == [0, 0, 0, 1] and t.about["expert_bytes"] == [10, 20]
    assert cold_experts(t, 0).nbytes == 10 * 0 + 20 * 2
    f.write_text(ROUTE.replace("residency,expert_bytes", "residency,expert_bytes,dropped").replace(",0,10\n", ",0,10,0\n"))
    assert np.array_equal(import_trace(f).ids, t.ids)  # columns are found by name; later versions append some
    f.write_bytes(b"\xef\xbb\xbf" + ROUTE.replace("\n", "\r\n").encode())
    assert np.array_equal(import_trace(f).ids, t.ids)


@pytest.mark.parametrize("old, new, message", [
    ("0,0,1,1,0,1,nan", "0,0,1,1,0,4,nan", "line 8: expert 4, but there are 4"),
    ("0,0,1,1,0,1,nan", "0,0,1,1,0,-1,nan", "line 8: expert -1"),
    ("0,0,1,1,0,1,nan", "0,0,1,1,2,1,nan", "line 8: slot 2, but a token goes to 2"),
    ("0,0,1,1,0,1,nan", "0,2,1,1,0,1,nan", "line 8: phase 2; 0 is the prompt"),
    ("0,0,1,1,0,1,nan", "0,0,-1,1,0,1,nan", "line 8: turn 0, step -1"),
    ("0,0,1,1,0,1,nan", "0,0,1,1,1,1,nan", "line 9: turn 0, step 1, layer 1, slot 1 for the second time"),
    ("0,0,1,1,0,1,nan", "0,0,1,1,0,one,nan", "line 8: expert is 'one'; a whole number"),
    ("0,0,1,1,0,1,nan", "0,0,1,1,0,1.5,nan", "line 8: expert is '1.5'"),
    ("0,0,1,1,0,1,nan", "0,0,1,1,0,99999999999999999999,nan", "line 8: expert is '9999"),
    ("0,0,1,1,0,1,nan", "0,0,1,1,0,1,heavy", "line 8: weight is 'heavy'; a number"),
    ("0,0,1,1,0,1,nan", "0,0,1,1,0,1", "line 8: 8 values, 9 are wanted"),
    ("0,0,1,1,0,1,nan", "0,0,1,1,0,1,nan,3", "line 8: 10 values"),
    ("0,0,1,1,0,1,nan,0,10\n", "", "line 8: turn 0, step 1, layer 1 has fewer than 2 experts; is the file cut off"),
    ("1,0,0,3,1,2,0.25,0,10\n", "", "line 18: turn 1, step 0, layer 3 has fewer than 2"),
    ("1,0,0,3,1,2,0.25,0,10\n", "1,0,0", "line 19: 3 values"),
    ("route_trace v1", "route_trace v7", "line 1: 'route_trace v7'"),
    ("n_expert=4", "n_expert=many", "line 2: .*whole number"),
    ("layer=3 expert_bytes=20", "layer=3 expert_bytes=", "line 4"),
    ("layer=3 expert_bytes=20 ", "layer=3 ", "line 4"),
    ("turn,phase,step,layer,slot,expert,", "turn,phase,step,layer,rank,expert,", "line 6: no column 'slot'"),
])  # fmt: skip
def test_malformed_route_traces_name_the_line(old, new, message, tmp_path):
    f = tmp_path / "r.csv"
    assert ROUTE.count(old) == 1
    f.write_text(ROUTE.replace(old, new))
    with pytest.raises(TraceError, match=f"r.csv: {message}"): load_trace(f)


@pytest.mark.parametrize("text, message", [
    ("", "no routing in it"),
    ("layer,expert\n", "no routing in it"),
    ("layer,expert\n0,1\n1\n", "line 3: 1 values"),
    ("0,1\n1,2\n\n0,x\n", "line 4: expert is 'x'"),
    ("0,1\n1,-2\n", "line 2: expert -2"),
    ("0,1\n-1,2\n", "line 2: layer -1"),
    ("a,b\n0,1\n", "line 2: no column 'layer'"),
    ("0,1\n0,2\n1,3\n1,4\n0,5\n1,6\n1,7\n", "line 5: a token with fewer than 2 experts in layer 0"),
    ("0,1\n0,2\n1,3\n1,4\n0,5\n0,5\n1,6\n1,7\n", "line 5: expert 5 twice for one token in layer 0"),
    ("0,1\n0,2\n0,3\n", "only layer 0 .*top_k="),
    ("0,1\n\xff\n", "line 2: .*not UTF-8"),
    ("hello\nworld\n", "line 2: hello is 'world'"),
])  # fmt: skip
def test_malformed_pairs_name_the_line(text, message, tmp_path):
    f = tmp_path / "p.csv"
    f.write_bytes(text.encode("latin-1"))
    with pytest.raises(TraceError, match=f"p.csv: {message}"): load_trace(f)


def test_pairs(tmp_path):
    f = tmp_path / "p.csv"
    f.write_text("layer,expert,weight\n2,1,0.5\n2,0,.25\n5,3,1\n5,2,nan\n2,1,0\n2,3,0\n5,0,0\n5,1,0")
    t = import_trace(f, num_experts=6)
    assert t.ids.tolist() == [[[1, 0], [3, 2]], [[1, 3], [0, 1]]] and t.about["layer_numbers"] == [2, 5]
    assert t.weights[0, 0].tolist() == [0.5, 0.25] and np.isnan(t.weights[0, 1, 1])
    f.write_text("0,1\n0,2\n0,1\n0,3\n")
    assert import_trace(f, top_k=2).ids.tolist() == [[[1, 2]], [[1, 3]]]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(1, 3), st.integers(1, 30))
def test_pairs_round_trip(tmp_path_factory, seed, L, K, T):
    ids = np.argsort(np.random.default_rng(seed).random((T, L, 6)), 2)[..., :K]
    f = tmp_path_factory.mktemp("x") / "p.csv"
    f.write_text("".join(f"{layer},{e}\n" for t in ids.tolist() for layer, row in enumerate(t) for e in row))
    assert np.array_equal(import_trace(f, num_experts=6).ids, ids)


@pytest.mark.parametrize("data, message", [
    ({"weights": np.zeros((2, 2, 2))}, "no experts"),
    ({"experts": np.zeros((2, 2))}, "experts of float64"),
    ({"experts": np.zeros((2, 2, 2), int), "weights": np.zeros((2, 2))}, "weights of float64"),
    ({"experts": np.zeros((2, 2, 2), int), "offsets": np.array([0, 3])}, "offsets should be"),
    ({"experts": np.zeros((3, 2, 2), int), "offsets": np.array([0, 2, 1, 3])}, r"offsets\[2\] is 1 after 2"),
    ({"experts": np.full((3, 2, 2), -7)}, "token 0, layer 0: expert -7"),
    ({"experts": np.array([[[object]]])}, "cannot be read"),
])  # fmt: skip
def test_malformed_npz(data, message, tmp_path):
    np.savez(tmp_path / "x.npz", **data)
    with pytest.raises(TraceError, match=message): load_trace(tmp_path / "x.npz")


def test_npz_cut_anywhere(tmp_path):
    np.savez_compressed(tmp_path / "whole.npz", experts=np.arange(24).reshape(4, 3, 2), weights=np.zeros((4, 3, 2), np.float16))
    whole = (tmp_path / "whole.npz").read_bytes()
    assert len(load_trace(tmp_path / "whole.npz")) == 4
    for n in range(0, len(whole), 11):
        (tmp_path / "x.npz").write_bytes(whole[:n])
        with pytest.raises(TraceError): load_trace(tmp_path / "x.npz")


def test_labels_that_do_not_fit(tmp_path):
    np.savez(tmp_path / "x_decode.npz", experts=np.zeros((2, 1, 1), int))
    for text, message in (("[1, 2]", "labels of 2 sequences"), ("{", "line 1: not valid JSON"), ("7", "labels of")):
        (tmp_path / "x_sequences.json").write_text(text)
        with pytest.raises(TraceError, match=message): load_trace(tmp_path / "x_decode.npz")


# statistics, against slow and obvious code

@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_statistics(seed, E):
    t = made_up(np.random.default_rng(seed), (E + 2, 6, 4), (2, 3, 1))
    texts = [[[[e for e in row if e != t.pad] for row in token] for token in s.ids.tolist()] for s in t.sequences()]
    n, share, reuse = activations(t), activation_share(t), next_token_reuse(t)
    gaps, windows = reuse_distances(t, 3), (1, 2, 4)
    distinct = distinct_experts(t, windows)
    for layer in range(3):
        uses = [e for s in texts for token in s for e in token[layer]]
        assert n[layer].tolist() == [uses.count(e) for e in range(n.shape[1])]
        assert abs(share[layer].sum() - 1) < 1e-9
        pairs = [(e in a[layer]) for s in texts for a, b in itertools.pairwise(s) for e in b[layer]]
        assert np.isclose(reuse[layer], np.mean(pairs)) if pairs else np.isnan(reuse[layer])
        want = [0] * 4
        for s in texts:
            last = {}
            for i, token in enumerate(s):
                for e in token[layer]:
                    want[min(i - last.get(e, -99), 4) - 1] += 1
                    last[e] = i
        assert gaps[layer].tolist() == want
        for i, w in enumerate(windows):
            seen = [len({e for token in s[a : a + w] for e in token[layer]}) for s in texts for a in range(0, len(s) - w + 1, w)]
            assert np.isclose(distinct[layer, i], np.mean(seen)) if seen else np.isnan(distinct[layer, i])
    assert (entropy(t) <= np.log2(max(t.num_experts)) + 1e-9).all()
    json.dumps(statistics(t), allow_nan=False)
    assert len(statistics_table(statistics(t)).splitlines()) == 8


def test_mutual_information_of_known_layers(tmp_path):
    "Layer 1 repeats layer 0, layer 2 tells half of it, layer 3 nothing; and the bias is gone."
    rng = np.random.default_rng(0)
    a = rng.integers(0, 8, 4000)
    ids = np.stack([a, a, a // 2 * 2 + rng.integers(0, 2, 4000), rng.integers(0, 8, 4000)], 1)[..., None]
    with TraceWriter(tmp_path / "t", [8] * 4, 1) as w: w.append(ids)
    mi = mutual_information(load_trace(tmp_path / "t"))
    assert np.allclose(mi, mi.T) and np.allclose(np.diag(mi), 3, atol=0.02)
    assert abs(mi[0, 1] - 3) < 0.02 and abs(mi[0, 2] - 2) < 0.03 and mi[0, 3] < 0.005


def test_the_heaviest_choice_counts(tmp_path):
    with TraceWriter(tmp_path / "t", [8], 3) as w:
        w.append([[[4, 5, 6]], [[1, -1, -1]], [[-1, -1, -1]]], [[[0.1, 0.7, 0.2]], [[0.0] * 3], [[0.0] * 3]])
    assert top_choice(load_trace(tmp_path / "t"))[:, 0].tolist() == [5, 1, 255]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 0.99))
def test_cold_experts(seed, share):
    "They have at most the share, one more would have more, and nobody outside is colder."
    t = made_up(np.random.default_rng(seed), (8, 4), (2, 1))
    c, n = cold_experts(t, share, [10, 100]), activations(t)
    used = sum(n[x] for x in c.experts)
    rest = [n[layer, e] for layer, E in enumerate(t.num_experts) for e in range(E) if (layer, e) not in c.experts]
    assert used <= share * n.sum() + 1e-6 and (not rest or used + min(rest) > share * n.sum())
    assert not rest or not c.experts or max(n[x] for x in c.experts) <= min(rest)
    assert c.nbytes == sum((10, 100)[layer] for layer, _ in c.experts) and c.total == 12
    assert np.isclose(c.share, used / max(1, n.sum())) and np.isclose(c.loads, used / len(t))


def test_cold_experts_of_unknown_size(trace):
    assert cold_experts(trace).nbytes is None and "device" not in str(cold_experts(trace))
    assert cold_experts(trace, 0.5, 1000).nbytes == 1000 * len(cold_experts(trace, 0.5).experts)
    for bad in (-0.1, 1, 7, float("nan")):
        with pytest.raises(TraceError, match="share"): cold_experts(trace, bad)


def test_nothing_to_count(tmp_path):
    "An empty trace has statistics, too."
    TraceWriter(tmp_path / "t", [8, 8], 2).close()
    t = load_trace(tmp_path / "t")
    s = statistics(t)
    assert s["tokens"] == 0 and s["layers"]["reuse"] == [None, None]
    assert "0 tokens" in statistics_table(s) and mutual_information(t).tolist() == [[0, 0], [0, 0]]
