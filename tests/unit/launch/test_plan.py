"""The plan: pure decisions from configuration and facts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.errors import ConfigError
from launch.machine import Gpu, MachineFacts, cpu_computes_bf16, parse_gpus
from launch.memory import estimate_memory
from launch.plan import DatasetFacts, RunPlan, build_plan
from launch.train import retry_plan
from training.config import load_config
from training.records import RankError

LAPTOP = MachineFacts("laptop", cpu_count=2, memory_bytes=8 * 2**30, cpu_bf16=False)
A100 = Gpu("NVIDIA A100-SXM4-80GB", 80 * 2**30, (8, 0))
V100 = Gpu("Tesla V100-SXM2-32GB", 32 * 2**30, (7, 0))


def node(name: str, gpu: Gpu, count: int) -> MachineFacts:
    return MachineFacts(name, cpu_count=96, memory_bytes=2**40, cpu_bf16=True, gpus=(gpu,) * count)


def plan(*overrides: str, nodes: list[MachineFacts] | None = None, dataset: DatasetFacts | None = None) -> RunPlan:
    return build_plan(load_config(None, overrides), nodes or [LAPTOP], dataset)


def refused(*overrides: str, nodes: list[MachineFacts] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(*overrides, nodes=nodes)
    return "\n".join(caught.value.findings)


def test_laptop_gets_two_ranks_gloo_and_fp32() -> None:
    made = plan()
    assert (made.world_size, made.backend, made.precision, made.device) == (2, "gloo", "fp32", "cpu")
    assert made.peak_flop_per_s is None


def test_gpu_node_gets_a_rank_a_gpu() -> None:
    made = plan("training.batch_size=64", nodes=[node("a", A100, 8), node("b", A100, 8)])
    assert (made.world_size, made.backend, made.precision) == (16, "nccl", "bf16")
    assert made.peak_flop_per_s == 16 * 312e12
    assert made.compile


def test_gpus_before_ampere_get_fp16() -> None:
    assert plan(nodes=[node("a", V100, 4)]).precision == "fp16"


def test_unknown_gpu_has_no_peak() -> None:
    assert plan(nodes=[node("a", Gpu("Oddity 9", 2**34, (9, 0)), 2)]).peak_flop_per_s is None


def test_more_ranks_than_gpus_is_refused() -> None:
    message = refused("distributed.ranks_per_node=4", nodes=[node("gpu1", A100, 2)])
    assert "4 ranks on gpu1, which has 2 GPU(s); set it to 2" in message


def test_indivisible_batch_names_the_neighbours() -> None:
    assert "use 32 or 34" in refused("training.batch_size=33")
    assert "use 2," in refused("training.batch_size=1")


def test_nccl_and_fp16_without_gpu_are_refused_together() -> None:
    message = refused("distributed.backend=nccl", "training.precision=fp16")
    assert "nccl needs an NVIDIA GPU" in message
    assert "fp16 needs a GPU" in message


def test_sequences_longer_than_the_context_are_refused() -> None:
    config = load_config(None, ["model.context_length=64"])
    with pytest.raises(ConfigError, match="longer than model.context_length"):
        build_plan(config, [LAPTOP], DatasetFacts(1000, 50, 128))


def test_dataset_without_held_out_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="no sequence is held out"):
        build_plan(load_config(), [LAPTOP], DatasetFacts(1000, 0, 128))


def test_steps_follow_from_epochs_once_the_data_is_known() -> None:
    assert plan().total_steps is None
    assert plan("training.num_epochs=3", dataset=DatasetFacts(1000, 50, 128)).total_steps == 3 * 1000 // 32
    assert plan("training.max_steps=7", dataset=DatasetFacts(1000, 50, 128)).total_steps == 7


def test_big_model_moves_up_the_stages_only_as_far_as_it_must() -> None:
    small = plan("model.preset=huginn-3.5b", "training.batch_size=64", nodes=[node("a", A100, 8)])
    assert small.zero_stage == 1
    tight = Gpu("NVIDIA A100-PCIE-40GB", 40 * 2**30, (8, 0))
    overrides = ("model.preset=huginn-3.5b", "training.batch_size=4", "training.activation_checkpointing=per_iteration")
    assert plan(*overrides, nodes=[node("a", tight, 4)]).zero_stage > 1


def test_model_that_fits_nowhere_is_noted() -> None:
    made = plan("model.preset=huginn-3.5b", "training.batch_size=2")
    assert "above 85%" in made.notes[0]


@given(
    ranks=st.integers(1, 64),
    per_rank=st.integers(1, 64),
    length=st.sampled_from([64, 128, 4096]),
)
def test_batch_is_always_factored_exactly(ranks: int, per_rank: int, length: int) -> None:
    made = plan(
        f"distributed.ranks_per_node={ranks}",
        f"training.batch_size={ranks * per_rank}",
        f"model.context_length={length}",
    )
    assert made.micro_batch * made.accumulation * made.world_size == made.batch_size


@given(world=st.integers(1, 256), precision=st.sampled_from(["fp32", "bf16"]))
def test_higher_stages_never_need_more_memory(world: int, precision: str) -> None:
    model = load_config(None, ["model.preset=1b"]).model
    totals = [
        estimate_memory(
            model,
            precision=precision,
            zero_stage=stage,
            world_size=world,
            micro_batch=1,
            sequence_length=4096,
            checkpointing=True,
        ).total_bytes
        for stage in (1, 2)
    ]
    assert totals == sorted(totals, reverse=True)


def test_plan_is_plain_json() -> None:
    values = json.loads(json.dumps(plan("training.max_steps=2").as_json()))
    assert values["world_size"] == 2
    assert values["total_flop"] == values["flop_per_token"] * values["tokens_per_step"] * 2


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_global_batch() -> None:
    made = plan("training.batch_size=24", "distributed.ranks_per_node=2")
    full = RankError(rank=1, time=0, cause="out of memory", exit_code=1, kind="out_of_memory", expected=True)
    smaller = retry_plan(made, [full])
    assert smaller is not None
    assert smaller.micro_batch == made.micro_batch // 2
    assert smaller.micro_batch * smaller.accumulation * smaller.world_size == 24
    assert retry_plan(made, []) is None
    while smaller.micro_batch > 1:
        smaller = retry_plan(smaller, [full])
        assert smaller is not None
    assert retry_plan(smaller, [full]) is None


def test_gpus_are_read_from_the_drivers_table() -> None:
    gpus = parse_gpus("NVIDIA H100 80GB HBM3, 81559, 9.0\nOdd, Name, 100, 8.6\nbroken line\n")
    assert gpus == (
        Gpu("NVIDIA H100 80GB HBM3", 81559 * 2**20, (9, 0)),
        Gpu("Odd, Name", 100 * 2**20, (8, 6)),
    )


def test_bf16_is_read_from_the_processor_flags() -> None:
    assert cpu_computes_bf16("flags\t: fpu avx512_bf16 sse\n")
    assert not cpu_computes_bf16("flags\t: fpu avx512f avx512_bf16x sse\n")
