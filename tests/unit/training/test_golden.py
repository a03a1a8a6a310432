"""The comparison with the reference passes, and notices when something is wrong."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from training.golden import compare, load_fixture, main

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for file in GOLDEN.glob("tiny_c.*"):
        shutil.copyfile(file, tmp_path / file.name)
    return tmp_path / "tiny_c"


@pytest.mark.parametrize("name", ["tiny_a", "tiny_c"])
def test_everything_agrees_with_the_reference(name: str) -> None:
    comparisons = compare(load_fixture(GOLDEN / name))
    assert [c for c in comparisons if not c.within] == []
    parts = " ".join(c.part for c in comparisons)
    for part in (
        "prelude_out",
        "adapter_out_step1",
        "core_raw_r1",
        "logits_r9",
        "loss_masked_r4",
        "loss_r9 in bf16",
        "n2_k4 total norm",
        "n5_k1",
        "n0_k6",
        "whole gradients",
        "exit kl",
        "exit cosine",
        "r4_zero_state tokens, no cache",
        "r4_warm_start tokens",
        "r4_zero_state logits",
    ):
        assert part in parts


def test_exit_code_tells_the_result(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(copied)]) == 0
    assert "all within tolerance" in capsys.readouterr().out
    weights = load_file(f"{copied}.weights.safetensors")
    weights["transformer.adapter.weight"][0, 0] += 0.05
    save_file(weights, f"{copied}.weights.safetensors")
    assert main([f"{copied}.json"]) == 1
    out = capsys.readouterr().out
    assert "OVER" in out and "some parts are over" in out
    # What does not depend on the adapter still agrees.
    assert next(line for line in out.splitlines() if "prelude_out" in line).endswith("ok")


def test_a_wrong_gradient_norm_and_a_nan_are_noticed(copied: Path) -> None:
    description = json.loads(Path(f"{copied}.json").read_text())
    description["grads"]["n2_k4"]["norms"]["transformer.ln_f.weight"] *= 1.01
    Path(f"{copied}.json").write_text(json.dumps(description))
    golden = load_file(f"{copied}.golden.safetensors")
    golden["logits_r4"][0, 0, 0] = float("nan")
    save_file(golden, f"{copied}.golden.safetensors")
    over = {c.part for c in compare(load_fixture(copied)) if not c.within}
    assert over == {"n2_k4 28 parameter norms (relative)", "logits_r4"}


def test_shared_cache_texts_are_compared_where_present(copied: Path) -> None:
    golden = load_file(f"{copied}.golden.safetensors")
    golden["greedy_tokens_r4_kv_budget4_zero_state"] = golden["greedy_tokens_r4_zero_state"].clone()
    golden["greedy_tokens_r4_kv_budget1_zero_state"] = golden["greedy_tokens_r4_zero_state"].clone()
    save_file(golden, f"{copied}.golden.safetensors")
    results = {c.part: c.within for c in compare(load_fixture(copied)) if "budget" in c.part}
    assert results == {
        "r4_kv_budget4_zero_state tokens (number wrong)": True,  # a slot an iteration: nothing is shared
        "r4_kv_budget1_zero_state tokens (number wrong)": False,
    }


def damage(base: Path, how: str) -> None:
    description, weights = Path(f"{base}.json"), Path(f"{base}.weights.safetensors")
    if how == "missing":
        weights.unlink()
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif how == "other":
        shutil.copyfile(GOLDEN / "tiny_a.weights.safetensors", weights)
    elif how == "json":
        description.write_text("{")
    elif how == "keys":
        description.write_text('{"config": {"n_embd": 32}}')
    else:
        content = json.loads(description.read_text())
        content["config"]["n_heads"] = 5
        description.write_text(json.dumps(content))


@pytest.mark.parametrize("how", ["missing", "cut", "other", "json", "keys", "heads"])
def test_unusable_files_are_named(copied: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage(copied, how)
    assert main([str(copied)]) == 2
    error = capsys.readouterr().err
    assert "tiny_c" in error and "next:" in error and "Traceback" not in error
