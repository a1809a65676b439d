"Predictions change when experts move, never what is computed: on the CPU, and on the simulated accelerator with everything late."

import sys
import threading

import pytest
import torch
from test_device import offloaded as on_device
from test_device import prompt
from test_device import resident as on_cpu
from test_exact import generate, offloaded, prompts, resident, same

from expertflow.config import ConfigError, ExpertFlowError
from expertflow.flow import ExpertFlow
from expertflow.foresight import Foresight, Tally
from expertflow.planner import Planner
from expertflow.taps import find_taps
from expertflow.testing import write_checkpoint

pytest_plugins = ["simdev.plugin"]
FAMILIES = ["olmoe", "mixtral", "qwen3_next", "deepseek_v3", "gpt_oss", "granitemoe", "flex_olmo", "minimax"]


class Gate:
    "The routers of later layers, asked about today's stream; or whatever they did not name."
    ahead = 2

    def __init__(self, model, wrong=False):
        self.taps, self.wrong, self.calls = find_taps(model), wrong, 0

    def __call__(self, layer, residual, routing):
        self.calls += 1
        out = residual.new_zeros(len(residual), self.ahead, max(t.num_experts for t in self.taps))
        for d, tap in enumerate(self.taps[layer + 1 : layer + 1 + self.ahead]):
            out[:, d].scatter_(1, tap.route(residual).ids, 0.9)
            if self.wrong:
                out[:, d, : tap.num_experts] = 0.9 - out[:, d, : tap.num_experts]
        return out


@pytest.mark.parametrize("wrong", [False, True], ids=["gate", "opposite"])
@pytest.mark.parametrize("mode", ["grouped_mm", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_bits_on_the_cpu(tmp_path, family, mode, wrong):
    path = write_checkpoint(family, tmp_path, dtype="bfloat16")
    ref = resident(path, mode)
    wants = [(p, generate(ref, p, 8)) for p in prompts(ref.config.vocab_size, (1, 33))]
    for budget in ("75%", "50%", "minimum"):
        with offloaded(path, mode, budget) as flow:
            gate = Gate(flow.model, wrong)
            eyes = Foresight(flow.runtime, gate.taps, gate)
            for p, want in wants:
                assert all(same(a, b) for a, b in zip(generate(flow.model, p, 8), want, strict=True)), (budget, p)
            assert gate.calls and eyes.tally.steps
            if budget == "75%" and not wrong:
                assert flow.runtime.cache.count.prefetched > 0


@pytest.mark.parametrize("wrong", [False, True], ids=["gate", "opposite"])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss"])
def test_equal_bits_on_a_device(sim, tmp_path, family, wrong):
    path = write_checkpoint(family, tmp_path, dtype="bfloat16")
    ref = on_cpu(path)
    ids = prompt(ref.config.vocab_size, 33, 3)
    want = generate(ref, {"input_ids": ids}, 30)
    sim.configure(delay=0.0001, link=2e9)
    for budget in ("75%", "0.001%"):
        with on_device(path, budget) as flow:
            gate = Gate(flow.model, wrong)
            eyes = Foresight(flow.runtime, gate.taps, gate)
            got = generate(flow.model, {"input_ids": ids.to("sim")}, 30)
            assert all(same(a.cpu(), b) for a, b in zip(got, want, strict=True))
            assert eyes.tally.steps > 0


def test_looking_ahead_waits_for_nobody(sim, tmp_path):
    "No more waits for the device than without, whether experts are missing or not."
    path = write_checkpoint("olmoe", tmp_path, dtype="bfloat16")
    for budget in ("100%", "50%"):
        with on_device(path, budget) as flow:
            ids, waits = prompt(flow.model.config.vocab_size).to("sim"), []
            taps = find_taps(flow.model)
            for look in (False, True):
                eyes = Foresight(flow.runtime, taps, Gate(flow.model)) if look else None
                generate(flow.model, {"input_ids": ids}, 4)
                before = flow.runtime.traffic.waits, sim.counters()["syncs"]
                generate(flow.model, {"input_ids": ids}, 20)
                waits.append((flow.runtime.traffic.waits - before[0], sim.counters()["syncs"] - before[1]))
                if eyes:
                    eyes.close()
            # a layer whose experts are all there needs no wait; which layers those are is not the same with prefetching
            more = waits[1][0] - waits[0][0]
            assert waits[1][0] <= 20 * len(taps) and (budget != "100%" or more <= 0), (budget, waits)
            assert waits[1][1] - waits[0][1] <= max(0, more), (budget, waits)


def test_recall_of_routers_that_see_their_own_stream(tmp_path):
    "A predictor that is told the truth by the routers themselves has recall 1; the tally sees it."
    with ExpertFlow.from_pretrained("tiny-moe", gpu_memory_budget="50%") as flow:
        taps = find_taps(flow.model)
        ids = torch.arange(5, 25)[None]
        streams = {}
        from expertflow.taps import Watch

        with Watch(taps, lambda layer, residual, out: streams.__setitem__(layer, residual)), torch.no_grad():
            flow.model(ids)

        class Knows:
            ahead = 3

            def __call__(self, layer, residual, routing):
                out = torch.zeros(len(residual), 3, 32)
                for d, tap in enumerate(taps[layer + 1 : layer + 4]):
                    out[:, d].scatter_(1, tap.route(streams[tap.layer]).ids, 1.0)
                return out

        eyes = Foresight(flow.runtime, taps, Knows())
        with torch.no_grad():
            flow.model(ids)
        assert eyes.tally.recall() == eyes.tally.precision() == [1.0] * 3
        assert eyes.tally.needed[0] > eyes.tally.needed[1] > eyes.tally.needed[2] > 0
        eyes.close()
        assert flow.runtime.prefetcher is None and not eyes.watch.hooks


def test_a_broken_predictor_is_seen_and_the_next_run_works(tmp_path):
    path = write_checkpoint("olmoe", tmp_path)
    with offloaded(path, "grouped_mm", "50%") as flow:
        ids = {"input_ids": torch.arange(3, 20)[None]}
        want = generate(flow.model, ids, 5)

        class Broken(Gate):
            def __call__(self, layer, residual, routing):
                if layer == 1:
                    raise ExpertFlowError("the predictor is broken")
                return torch.full_like(super().__call__(layer, residual, routing), torch.nan)

        eyes = Foresight(flow.runtime, find_taps(flow.model), Broken(flow.model))
        with pytest.raises(ExpertFlowError, match="is broken"):
            generate(flow.model, ids, 5)
        eyes.close()
        assert all(same(a, b) for a, b in zip(generate(flow.model, ids, 5), want, strict=True))


def test_threads_do_not_mix_their_streams(tmp_path):
    path = write_checkpoint("olmoe", tmp_path, dtype="bfloat16")
    ref = resident(path, "grouped_mm")
    texts = [{"input_ids": torch.randint(3, ref.config.vocab_size, (1, 20 + i))} for i in range(3)]
    wants = [generate(ref, t, 12) for t in texts]
    with offloaded(path, "grouped_mm", "50%") as flow:
        Foresight(flow.runtime, find_taps(flow.model), Gate(flow.model))
        gots = [None] * 3

        def run(i):
            gots[i] = generate(flow.model, texts[i], 12)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        for got, want in zip(gots, wants, strict=True):
            assert all(same(a, b) for a, b in zip(got, want, strict=True))


def test_distances_are_checked(tmp_path):
    path = write_checkpoint("olmoe", tmp_path)
    with offloaded(path, "grouped_mm", "50%") as flow:
        for far in (0, 3):
            with pytest.raises(ConfigError, match=f"prediction_lookahead={far}: .* 1 to 2 layers"):
                Foresight(flow.runtime, find_taps(flow.model), Gate(flow.model), far, planner=Planner(flow.runtime.cache, 1))
        assert flow.runtime.prefetcher is None and not flow.runtime.executor.timing


def test_a_report_while_the_first_layers_are_counted():
    "By another thread, which counts distances and layers for the first time."
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            t = Tally()
            thread = threading.Thread(target=lambda t=t: [t.add(k % 4 + 1, [1, 2], [2, 3], k) for k in range(60)])
            thread.start()
            while thread.is_alive():
                t.as_dict()
        assert t.as_dict()["recall"] == [0.5] * 4 and len(t.as_dict()["layers"]) == 60
    finally:
        sys.setswitchinterval(before)


def test_tally():
    t = Tally()
    t.add(2, [1, 2, 3], [2, 5])
    t.add(1, [], [4])
    assert t.recall() == [0.0, 0.5] and t.precision() == [None, 1 / 3]


def settings(**kw):
    return {"gpu_memory_budget": "50%", "context": 128} | kw


def test_settings_of_prediction(tmp_path):
    "Off by default; a file or `gate` turns it on; what it takes is part of the plan and of the report."
    text = {"prompt": "She looked at the sea and", "max_new_tokens": 12, "do_sample": False}
    with ExpertFlow.from_pretrained("tiny-moe", **settings()) as flow:
        assert flow.foresight is None and flow.runtime.prefetcher is None and flow.report().prediction is None
        want, dense = flow.generate(**text), flow.plan.dense
    for kw, far in (({"prediction_model_path": "gate"}, 4), ({"prediction_lookahead": 1}, 1),
                    ({"prediction_model_path": "gate", "prediction_lookahead": 3}, 3)):  # fmt: skip
        with ExpertFlow.from_pretrained("tiny-moe", **settings(paced_link="20MB/s", **kw)) as flow:
            assert flow.foresight.lookahead == far and flow.plan.dense > dense
            assert flow.generate(**text) == want
            report = flow.report()
            assert len(report.prediction["recall"]) == far and report.cache["prefetched"] > 0
            assert "layers ahead, named" in str(report) and report.prediction["lookahead"] == far
        assert flow.runtime.prefetcher is None and not flow.foresight.watch.hooks
    with ExpertFlow.from_pretrained("tiny-moe", **settings(prediction_model_path="gate", prediction_lookahead=0)) as flow:
        assert flow.foresight is None


def test_the_predictor_of_another_model_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    from expertflow.predictor import LayerAhead, save_predictor

    path = write_checkpoint("olmoe", tmp_path / "model", dtype="bfloat16")
    with ExpertFlow.from_pretrained(path, **settings()) as flow:
        save_predictor(LayerAhead(find_taps(flow.model)), tmp_path / "p.safetensors", flow)
    with ExpertFlow.from_pretrained(path, **settings(prediction_model_path=tmp_path / "p.safetensors")) as flow:
        assert flow.foresight.name.endswith("p.safetensors")
    monkeypatch.setattr("expertflow.flow.load_model", None)
    for file, why in ((tmp_path / "p.safetensors", "was made for the model"), (tmp_path / "none", "no file"), (path, "no file")):
        with pytest.raises(ExpertFlowError, match=why):
            ExpertFlow.from_pretrained("tiny-moe", **settings(prediction_model_path=file))


def test_what_a_predictor_takes_is_planned(tmp_path):
    "The matrices it holds on the device are not more than the plan says."
    path = write_checkpoint("olmoe", tmp_path, dtype="bfloat16")
    with ExpertFlow.from_pretrained(path, **settings(prediction_lookahead=4)) as flow:
        p = flow.foresight.predictor
        tensors = [t for t in [*p.fold, p.curve, *(x for c in p.corrections.values() for x in (c.up, c.down))] if t is not None]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert 0 < sum(held.values()) <= flow.inventory.components["predictor"].nbytes + 1024
