"""The peers of the benchmark: their processes, their answers, and the figures made of them."""

import sys
from pathlib import Path

import pytest
from peer_engines import OpenVino, llama_answer, vllm_servers
from peer_figures import SPECULATIVE, domain_figures, overall_figures, pool, speed_cell
from peer_passes import pass_figures
from peer_records import PeerRecords
from peer_tables import tables

from autotune.bench.contenders import GENERATE, PLAIN_NAME
from autotune.bench.contest import Runs
from autotune.bench.measuring import FLOOR
from autotune.serving_engines.interface import Deployment
from autotune.serving_engines.process import ServerError
from engine.pair import load_draft, load_target
from engine.timing import TimedText
from engine.trace import Trace
from fake_vllm import make_environment
from pairs import save_noisy_copy, save_target


def test_vllm_competes_in_the_modes_its_environment_offers(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment")
    common = Deployment(
        model=tmp_path, dtype="float32", threads=1, max_tokens=64, logs=tmp_path / "logs"
    )
    servers = vllm_servers(python, common)
    assert [server.name for server in servers] == ["vLLM plain", "vLLM n-gram"]
    try:
        for server in servers:
            server.start()
            with server.awake():
                assert server.run(Trace("a", [1, 2], [0] * 3)).n_tokens == 3
    finally:
        for server in servers:
            server.stop()


def test_a_peer_that_cannot_start_can_be_stopped(tmp_path: Path) -> None:
    peer = OpenVino(
        "plain",
        python=Path(sys.executable),
        model=tmp_path,
        dtype="bfloat16",
        threads=1,
        logs=tmp_path,
    )
    with pytest.raises(ServerError, match="openvino|ended"):
        peer.start()
    peer.stop()


def test_llama_cpp_tells_when_the_first_token_was_there() -> None:
    answer = {"tokens": [4, 5, 6], "timings": {"prompt_ms": 40.0, "predicted_ms": 60.0}}
    run = llama_answer(answer, total_s=0.11)
    assert run.token_ids == (4, 5, 6)
    assert run.decode_s == pytest.approx(0.06)
    assert run.decode_tokens_per_s == pytest.approx(2 / 0.06)


def runs(**seconds: float) -> Runs:
    """Return two runs of four tokens per contender, of the given total seconds each."""
    return {
        name.replace("_", " "): [TimedText(s, s / 2, (1, 2, 3, 4)), TimedText(s, s / 2, (1,) * 4)]
        for name, s in seconds.items()
    }


def named(plain: float, speculative: float, generate: float, floor: float, **more: float) -> Runs:
    ours = {PLAIN_NAME: plain, SPECULATIVE: speculative, GENERATE: generate, FLOOR: floor}
    return {
        name: done for key, s in ours.items() for name, done in ((key, runs(x=s)["x"]),)
    } | runs(**more)


def test_figures_compare_with_the_best_mode_of_each_engine() -> None:
    here = named(2.0, 1.0, 4.0, 0.5, vLLM_plain=3.0, vLLM_suffix=1.5, OpenVINO_plain=0.8)
    figures = domain_figures(here)
    assert figures["speculative_over_plain"] == pytest.approx(2.0)
    assert figures["speculative_over_vllm"] == pytest.approx(1.5)
    assert figures["speculative_over_vllm_against"] == "vLLM suffix"
    assert figures["speculative_over_openvino"] == pytest.approx(0.8)
    assert figures["speculative_over_openvino_against"] == "OpenVINO plain"
    alone = domain_figures(named(2.0, 1.0, 4.0, 0.5))
    assert "speculative_over_vllm" not in alone
    assert alone["speculative_over_transformers_against"] == GENERATE


def test_overall_figures_pool_the_domains_and_leave_out_who_missed_one() -> None:
    domains = {
        "code": named(2.0, 1.0, 4.0, 0.5, vLLM_plain=3.0),
        "chat": named(2.0, 2.0, 2.0, 0.5),
    }
    figures = overall_figures(domains)
    assert figures["plain_over_transformers"] == pytest.approx(6.0 / 4.0)
    assert figures["plain_over_floor"] == pytest.approx(4.0)
    assert "vLLM plain" not in pool(domains)
    assert len(pool(domains)[PLAIN_NAME]) == 4


def test_tables_show_every_contender_and_every_figure() -> None:
    domains = {"code": named(2.0, 1.0, 4.0, 0.5, vLLM_plain=3.0), "chat": named(2.0, 2, 2, 0.5)}
    figures = overall_figures(domains) | {n: domain_figures(r) for n, r in domains.items()}
    speeds, ratios = tables(domains, figures)
    assert list(speeds.columns[0].cells)[-1] == "vLLM plain"
    assert speed_cell(domains["code"], PLAIN_NAME) == "2 (3)"
    assert speed_cell(domains["chat"], "vLLM plain") == ""
    assert "speculative_over_vllm" in list(ratios.columns[1].cells)


def test_finished_domains_are_kept_for_the_same_settings_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.json"
    records = PeerRecords(path, {"threads": 2})
    assert records.get("code") is None
    kept = named(2.0, 1.0, 4.0, 0.5)
    records.put("code", kept)
    assert PeerRecords(path, {"threads": 2}).get("code") == kept
    assert PeerRecords(path, {"threads": 1}).get("code") is None


def test_passes_and_draft_steps_are_timed_beside_plain_rounds(tmp_path: Path) -> None:
    target = load_target(str(save_target(tmp_path / "target")), dtype="float32", device="cpu")
    draft = load_draft(str(save_noisy_copy(tmp_path / "target", tmp_path / "draft")), target)
    texts = [Trace("a", [5, 6, 7], list(range(10, 40)))]
    figures = pass_figures(target, draft.draft, texts)
    for name in ("pass_8_over_1", "draft_step_share"):
        value, low, high = figures[name], figures[f"{name}_low"], figures[f"{name}_high"]
        assert value is not None and low is not None and high is not None
        assert 0 < low <= value <= high
