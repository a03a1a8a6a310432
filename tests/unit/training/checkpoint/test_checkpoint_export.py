"""Export and import: names and keys of the reference, and the same numbers back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from training.checkpoint.export import export, model_section, read_weights, reference_config, rotary_table
from training.errors import UsageError
from training.model.recurrent import RecurrentLM

GOLDEN = Path(__file__).parents[3] / "golden"


def _golden(name: str):
    config = json.loads((GOLDEN / f"{name}.json").read_text())["config"]
    return config, load_file(GOLDEN / f"{name}.weights.safetensors")


@pytest.mark.parametrize("name", ["tiny_a", "tiny_c"])
def test_the_reference_s_own_keys_and_names_come_out(tmp_path, name):
    config, weights = _golden(name)
    model = model_section(config)
    plain = {key: value for key, value in weights.items() if key != "freqs_cis"}
    folder = export(plain, model, tmp_path / "out", form="hf")
    assert json.loads((folder / "config.json").read_text()) == config
    written = load_file(folder / "model.safetensors")
    assert written.keys() == weights.keys()
    for key, tensor in weights.items():
        tolerance = 1e-5 if key == "freqs_cis" else 0.0
        torch.testing.assert_close(written[key], tensor, atol=tolerance, rtol=0)


@pytest.mark.parametrize("form", ["hf", "safetensors"])
def test_import_gives_back_what_was_exported(tmp_path, form):
    config, weights = _golden("tiny_a")
    model = model_section(config)
    weights.pop("freqs_cis")
    folder = export(weights, model, tmp_path / "out", form=form, shard_bytes=200_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    again, back = read_weights(folder)
    assert again.model_dump(exclude={"preset"}) == model.model_dump(exclude={"preset"})
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[key], weights[key]) for key in weights)
    RecurrentLM(again).load_state_dict(back)


def test_a_reference_checkpoint_is_read_as_it_is(tmp_path):
    config, _ = _golden("tiny_c")
    (tmp_path / "config.json").write_text(json.dumps({**config, "some_other_key": 1}))
    (tmp_path / "model.safetensors").write_bytes((GOLDEN / "tiny_c.weights.safetensors").read_bytes())
    model, weights = read_weights(tmp_path)
    assert not model.tie_embeddings
    assert "freqs_cis" not in weights
    assert "lm_head.weight" in weights


def test_sixteen_bit_weights_keep_a_float_rotary_table(tmp_path):
    config, weights = _golden("tiny_a")
    weights.pop("freqs_cis")
    folder = export(weights, model_section(config), tmp_path / "out", form="hf", dtype=torch.bfloat16)
    written = load_file(folder / "model.safetensors")
    assert written["transformer.wte.weight"].dtype == torch.bfloat16
    assert written["freqs_cis"].dtype == torch.float32
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_rotary_table_is_that_of_the_reference():
    config, weights = _golden("tiny_a")
    torch.testing.assert_close(rotary_table(model_section(config)), weights["freqs_cis"], atol=1e-5, rtol=0)


def test_an_export_does_not_overwrite(tmp_path):
    config, weights = _golden("tiny_a")
    weights.pop("freqs_cis")
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        export(weights, model_section(config), tmp_path / "out", form="hf")


def test_what_does_not_fit_is_named(tmp_path):
    config, weights = _golden("tiny_a")
    model = model_section(config)
    weights.pop("freqs_cis")
    weights["transformer.stray"] = torch.zeros(1)
    weights["transformer.ln_f.weight"] = torch.zeros(3)
    del weights["transformer.adapter.weight"]
    with pytest.raises(UsageError) as caught:
        export(weights, model, tmp_path / "out", form="hf")
    for words in ("adapter.weight is missing", "stray is unknown", "has shape [3] instead of [64]"):
        assert words in caught.value.cause
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"model_type": "llama"}, "model type 'llama'"), ({"num_key_value_heads": 2}, "grouped-query attention")],
)
def test_other_models_are_refused(tmp_path, change, words):
    config, _ = _golden("tiny_a")
    with pytest.raises(UsageError, match=words):
        model_section({**config, **change})


def test_missing_files_and_keys_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"config\.json"):
        read_weights(tmp_path)
    config, _ = _golden("tiny_a")
    del config["n_embd"]
    with pytest.raises(UsageError, match="n_embd"):
        model_section(config)
    (tmp_path / "config.json").write_text(json.dumps(reference_config(model_section(_golden("tiny_a")[0]))))
    with pytest.raises(UsageError, match=r"lacks model\.safetensors"):
        read_weights(tmp_path)
