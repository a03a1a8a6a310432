"""A real DeepSpeed engine of one process: captured, saved beside training, loaded again, bit for bit."""

from __future__ import annotations

import os
import socket
import threading

import pytest
import torch

from training.checkpoint import catalog, engine_io, resume
from training.checkpoint.errors import CheckpointError
from training.checkpoint.ranks import OneRank
from training.checkpoint.saver import Identity, Saver
from training.checkpoint.state import SavedProgress
from training.checkpoint.universal import needs_conversion
from training.config import ModelSection
from training.model.init import init_weights
from training.model.recurrent import RecurrentLM

MODEL = ModelSection(
    preset=None,
    vocab_size=61,
    context_length=16,
    width=16,
    heads=2,
    mlp_width=24,
    prelude_layers=1,
    core_layers=1,
    coda_layers=1,
    mean_recurrence=3,
    backprop_depth=2,
)
IDENTITY = Identity("config", "tokenizer")


@pytest.fixture(scope="module", autouse=True)
def process_group():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        torch.distributed.init_process_group("gloo")
        yield
        torch.distributed.destroy_process_group()


def make_engine(stage: int, precision: str = "fp32", seed: int = 0):
    import deepspeed

    model = RecurrentLM(MODEL)
    init_weights(model, MODEL, seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-2),
        config={
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": precision == "bf16"},
            "steps_per_print": None,
        },
    )
    return engine


def train(engine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        tokens = torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(step))
        loss = engine(tokens[:, :-1], tokens[:, 1:], steps=(1, 2), state_scale=0.0).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp32"), (1, "bf16"), (3, "fp32")])
def test_a_resumed_run_is_bit_identical(tmp_path, stage, precision):
    engine = make_engine(stage, precision)
    train(engine, 0, 3)
    saver = Saver(engine, tmp_path, OneRank(), IDENTITY)
    stall_s = saver.save(SavedProgress(3, 1, 12, {"tokens": 96.0}), evaluation_loss=2.5)
    random_after = torch.rand(3).tolist()
    expected = train(engine, 3, 7)  # goes on while the save is written
    (result,) = saver.close()
    assert result.ok, result.error
    assert 0 < stall_s < 5

    fresh = make_engine(stage, precision, seed=9)
    resumed = resume.load(fresh, resume.find(tmp_path, OneRank()), OneRank(), IDENTITY)
    assert resumed.progress == SavedProgress(3, 1, 12, {"tokens": 96.0})
    assert not resumed.converted
    assert resumed.manifest.evaluation_loss == 2.5
    assert torch.rand(3).tolist() == random_after
    assert fresh.global_steps == 3
    assert train(fresh, 3, 7) == expected
    # In-run rollback: the same engine, after further training.
    resume.load(fresh, resume.find(tmp_path, OneRank()), OneRank(), IDENTITY)
    assert train(fresh, 3, 7) == expected


def test_stage_0_converts_to_stage_1_and_keeps_groups_apart(tmp_path):
    engine = make_engine(0)
    train(engine, 0, 3)
    saver = Saver(engine, tmp_path, OneRank(), IDENTITY)
    saver.save(SavedProgress(3, 0, 12), wait=True)
    saver.close()
    expected = train(engine, 3, 6)
    for stage in (1, 3):
        other = make_engine(stage, seed=5)
        resumed = resume.load(other, resume.find(tmp_path, OneRank()), OneRank(), IDENTITY)
        assert resumed.converted
        assert [group["weight_decay"] for group in other.optimizer.param_groups] == [0.1, 0.0]
        assert train(other, 3, 6) == pytest.approx(expected, abs=1e-6)


def test_at_most_one_save_is_in_flight_and_waiting_counts_as_stall(tmp_path, monkeypatch):
    engine = make_engine(1)
    train(engine, 0, 1)
    gate = threading.Event()
    saver = Saver(engine, tmp_path, OneRank(), IDENTITY, after_commit=lambda folder: gate.wait(10))
    saver.save(SavedProgress(1, 0, 4))
    assert saver.poll() == []
    threading.Timer(0.2, gate.set).start()
    stall_s = saver.save(SavedProgress(2, 0, 8))
    assert stall_s > 0.1
    results = saver.close()
    assert [result.step for result in results] == [1, 2]
    assert all(result.ok for result in results)
    assert results[0].size_bytes > 1000


def test_a_failed_save_is_reported_and_training_goes_on(tmp_path):
    engine = make_engine(1)
    train(engine, 0, 1)
    blocked = tmp_path / "file"
    blocked.write_text("x")
    saver = Saver(engine, blocked, OneRank(), IDENTITY)
    saver.save(SavedProgress(1, 0, 4))
    train(engine, 1, 2)
    (result,) = saver.close()
    assert not result.ok
    assert "checkpoint not saved" in result.error.cause


def test_another_tokenizer_is_refused(tmp_path):
    engine = make_engine(1)
    train(engine, 0, 1)
    saver = Saver(engine, tmp_path, OneRank(), IDENTITY)
    saver.save(SavedProgress(1, 0, 4), wait=True)
    saver.close()
    choice = catalog.newest_valid(tmp_path)
    with pytest.raises(CheckpointError, match="another tokenizer"):
        resume.load(engine, choice, OneRank(), Identity("config", "other"))


def test_nothing_to_resume_from_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        resume.load(None, resume.find(tmp_path, OneRank()), OneRank())


def test_the_capture_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = make_engine(1)
    train(engine, 0, 1)
    files = engine_io.capture(engine, engine_io.install(engine))
    assert sorted(files) == [
        "deepspeed/mp_rank_00_model_states.pt",
        "deepspeed/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ]
    assert list(tmp_path.iterdir()) == []


def test_what_needs_conversion(make_checkpoint, tmp_path):
    manifest = catalog.scan(make_checkpoint(tmp_path, 1).parent)[0].manifest
    assert not needs_conversion(manifest, 2, 1, "fp32")
    assert needs_conversion(manifest, 3, 1, "fp32")
    assert needs_conversion(manifest, 2, 2, "fp32")
    assert needs_conversion(manifest, 2, 1, "bf16")
