"""The configuration: what loads, what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from training.config import PRESETS, dump_config, load_config
from training.config.load import parse_override
from training.config.reference import reference
from training.config.schema import RunConfig
from training.errors import EXIT_CONFIG, ConfigError, UsageError

CHECKOUT = Path(__file__).resolve().parents[3]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def findings(path: Path | None, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == EXIT_CONFIG
    return caught.value.findings


def test_deployment_guide_fragment_loads_unchanged(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'training: {batch_size: 8192, num_epochs: 10, optimizer: "AdamW", learning_rate: 5e-5}\n'
        'distributed: {backend: "nccl", init_method: "env://"}\n',
    )
    config = load_config(path)
    assert (config.training.batch_size, config.training.num_epochs) == (8192, 10)
    assert config.training.optimizer == "adamw"
    assert config.training.learning_rate == 5e-5
    assert (config.distributed.backend, config.distributed.init_method) == ("nccl", "env://")


def test_config_of_the_checkout_loads() -> None:
    assert load_config(CHECKOUT / "config.yaml").model.preset == "demo"


def test_every_error_is_named_in_one_answer_with_its_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "trainin:\n  x: 1\n"
        "training:\n  batchsize: 3\n  batch_size: [1, 2]\n  learning_rate: -1\n"
        "model:\n  preset: hugin\n  widht: 5\n"
        "data: 5\n",
    )
    found = "\n".join(findings(path))
    assert "line 1: trainin: unknown key; did you mean 'training'?" in found
    assert "line 4: training.batchsize: unknown key; did you mean 'batch_size'?" in found
    assert "line 5: training.batch_size: input should be a valid integer (got a list: [1, 2])" in found
    assert "line 6: training.learning_rate: input should be greater than 0" in found
    assert "line 8: model.preset: there is no preset 'hugin'; choose one of huginn-3.5b" in found
    assert "line 9: model.widht: unknown key; did you mean 'width'?" in found
    assert "line 10: data:" in found


def test_tab_is_named_as_a_tab(tmp_path: Path) -> None:
    (finding,) = findings(write(tmp_path, "training:\n\tbatch_size: 3\n"))
    assert "line 2" in finding
    assert "tab" in finding


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("- a\n- b\n", "expected sections"),
        ("training: {batch_size: 1\n", "not valid YAML"),
        ("training:\n  batch_size: 1\n  batch_size: 2\n", "given twice"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in findings(write(tmp_path, text))[0]


def test_missing_file_and_folder_are_usage_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(UsageError) as caught:
            load_config(path)
        assert caught.value.exit_code == EXIT_CONFIG


def test_overrides_win_and_are_named_in_errors(tmp_path: Path) -> None:
    path = write(tmp_path, "training: {max_steps: 5}\n")
    assert load_config(path, ["training.max_steps=7", "run.name=a b".replace(" ", "-")]).training.max_steps == 7
    (finding,) = findings(path, "training.max_steps=x")
    assert finding.startswith("--set training.max_steps=x: training.max_steps: input should be a valid integer")
    assert "section.key=value" in findings(path, "training.max_steps")[0]
    assert "is a value" in findings(path, "training.max_steps.deeper=1")[0]


def test_override_value_may_contain_anything() -> None:
    assert parse_override("evaluation.prompt='a; rm -rf \"x\" = $(y)'") == (
        ("evaluation", "prompt"),
        'a; rm -rf "x" = $(y)',
    )


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["training.update_clipping=true"], "adam-atan2"),
        (["training.update_clipping=true", "training.optimizer=adam-atan2"], "flat partitions"),
        (["training.compile=true", "distributed.zero_stage=3"], "zero_stage 3"),
        (["training.max_steps=5", "training.warmup_steps=4", "training.cooldown_steps=3"], "longer than the run"),
        (["training.min_learning_rate=1"], "above learning_rate"),
        (["training.batch_size=10", "training.micro_batch_size=4"], "not a multiple"),
        (["training.activation_checkpointing=reentrant"], "more than once"),
        (["model.width=100"], "not a multiple of heads"),
        (["distributed.init_method=tcp://host"], "tcp://host:port"),
        (["run.name=a/b"], "letters, digits"),
    ],
)
def test_impossible_combinations_are_refused_with_the_reason(overrides: list[str], reason: str) -> None:
    assert reason in "\n".join(findings(None, *overrides))


def test_update_clipping_is_possible_on_whole_tensors() -> None:
    overrides = ["training.update_clipping=true", "training.optimizer=Adam-atan2"]
    assert load_config(None, [*overrides, "distributed.zero_stage=0", "training.precision=fp32"])


def test_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config().run.seed = 3  # type: ignore[misc]


@given(
    st.sampled_from(sorted(PRESETS)),
    st.floats(1e-9, 1, allow_nan=False),
    st.integers(1, 10**6),
    st.text(max_size=30),
)
def test_resolved_config_reads_back_to_itself(preset: str, rate: float, steps: int, prompt: str) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"preset": preset},
            "training": {"learning_rate": rate, "max_steps": steps},
            "evaluation": {"prompt": prompt},
        }
    )
    assert RunConfig.model_validate(yaml.safe_load(dump_config(config))) == config


def test_every_key_is_described() -> None:
    waiting: list[tuple[str, type[BaseModel]]] = [("", RunConfig)]
    while waiting:
        name, section = waiting.pop()
        assert section.__doc__, name
        for key, field in section.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                waiting.append((f"{name}.{key}", kind))
            else:
                assert field.description, f"{name}.{key}"


def test_reference_page_is_in_step_with_the_sections() -> None:
    page = (CHECKOUT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference() + "\n", "run: python -m training.config.reference > docs/configuration.md"
