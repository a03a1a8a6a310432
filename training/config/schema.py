"""The run configuration: one frozen object per section of config.yaml.

Every field has a description; `docs/configuration.md` is generated from them, and `config.yaml` shows the usual ones.
Checks that need only the configuration are here; checks that need to know the machine (GPUs, ranks, memory) are in
launch/plan.py.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from training.config.base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    lower_case,
)
from training.config.prepare import PrepareSection
from training.config.presets import PRESETS


class RunSection(Section):
    """What the run is called and where its folder lies."""

    name: str | None = Field(None, description="Name of the run and of its folder; null makes one from date and time.")
    dir: str = Field("runs", description="Folder that holds the run folders.")
    seed: NonNegativeInt = Field(42, description="Seed of weights, data order, recurrence and latent state.")
    init_from: str | None = Field(
        None, description="Folder of exported weights to start from (fab export, or the public reference model)."
    )

    @field_validator("name")
    @classmethod
    def _name_is_a_folder_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
            raise ValueError("use letters, digits, '.', '_' and '-' (at most 100, starting with a letter or digit)")
        return value


class ModelSection(Section):
    """Shape of the recurrent-depth model. A preset fills what is not given."""

    preset: str | None = Field("demo", description=f"One of {', '.join(PRESETS)}; null takes only the keys below.")
    vocab_size: PositiveInt = Field(65536, description="Entries of the vocabulary; at least those of the tokenizer.")
    context_length: PositiveInt = Field(4096, description="Longest sequence in tokens (size of the rotary table).")
    width: PositiveInt = Field(1024, description="Width C of the residual stream.")
    heads: PositiveInt = Field(16, description="Attention heads; width / heads must be even.")
    mlp_width: PositiveInt = Field(2816, description="Inner width of the gated MLP.")
    prelude_layers: PositiveInt = Field(2, description="Blocks of the prelude.")
    core_layers: PositiveInt = Field(4, description="Blocks of the recurrent core.")
    coda_layers: PositiveInt = Field(2, description="Blocks of the coda.")
    mean_recurrence: PositiveInt = Field(32, description="Mean number of core iterations in training (rbar).")
    backprop_depth: PositiveInt = Field(8, description="Last core iterations that receive gradient (k).")
    recurrence_sampling: Literal["lognormal-poisson", "poisson", "fixed"] = Field(
        "lognormal-poisson", description="How the number of iterations is drawn at each micro-batch."
    )
    rope_base: PositiveFloat = Field(50000.0, description="Base of the rotary position embedding.")
    norm_eps: PositiveFloat = Field(1e-6, description="Epsilon of RMSNorm.")
    qk_bias: bool = Field(True, description="Learned bias on queries and keys before the rotary embedding.")
    tie_embeddings: bool = Field(True, description="Use the embedding matrix as output head.")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        name = data.get("preset", "demo")
        if name is None:
            return data
        if not isinstance(name, str) or name not in PRESETS:
            return data  # named by the check below, with the line of the key
        return {**PRESETS[name], **data}

    @field_validator("preset")
    @classmethod
    def _preset_is_known(cls, value: str | None) -> str | None:
        if value is not None and value not in PRESETS:
            raise ValueError(f"there is no preset {value!r}; choose one of {', '.join(PRESETS)}")
        return value

    @model_validator(mode="after")
    def _head_width_is_even(self) -> ModelSection:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if (self.width // self.heads) % 2:
            raise ValueError(
                f"width / heads is {self.width // self.heads}, but rotary embedding needs an even head width"
            )
        return self

    @property
    def head_width(self) -> int:
        """Width D of one attention head."""
        return self.width // self.heads


class DataSection(Section):
    """Which dataset the run reads, and how."""

    path: str = Field(
        "demo", description="Folder of a prepared dataset (manifest.json in it); 'demo' is built on first use."
    )
    mixture: dict[str, PositiveFloat] | None = Field(
        None,
        description="Datasets with weights, read instead of `path`: {folder: passes an epoch}, 0.25 and 2 are fine.",
    )
    num_workers: NonNegativeInt = Field(0, description="Reader processes a rank; 0 reads in the training process.")
    prefetch_factor: PositiveInt = Field(4, description="Micro-batches that each reader process prepares ahead.")
    pin_memory: bool | Literal["auto"] = Field("auto", description="Page-locked batches; auto: where there is a GPU.")
    verify_checksums: bool = Field(True, description="Check each sequence's checksum as it is read.")
    shuffle_window_bytes: PositiveInt | None = Field(
        None, description="Shuffle within windows of this size (for data larger than the cache); null: over all data."
    )
    cache_dir: str = Field("~/.cache/loopworks/datasets", description="Local disk for datasets at s3:// addresses.")
    cache_limit_bytes: PositiveInt = Field(
        1_000_000_000_000, description="Most that the cache holds of a dataset, besides four shards on their way."
    )


class TrainingSection(Section):
    """Batch, length, optimizer, schedule, precision and memory."""

    batch_size: PositiveInt = Field(32, description="Global batch: sequences an optimizer step, over all ranks.")
    micro_batch_size: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="Sequences a rank takes at once; the rest of the batch is accumulated. auto: what memory allows.",
    )
    num_epochs: PositiveInt = Field(1, description="Passes over the training set, unless max_steps is given.")
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps; null derives them from num_epochs.")
    optimizer: Annotated[Literal["adamw", "adam-atan2"], BeforeValidator(lower_case)] = Field(
        "adamw", description="adamw, or adam-atan2 (the reference's Adam without epsilon in the division)."
    )
    learning_rate: PositiveFloat = Field(4e-5, description="Peak learning rate.")
    min_learning_rate: NonNegativeFloat = Field(0.0, description="Learning rate at the end of the schedule.")
    beta1: Fraction = Field(0.9, description="Decay of the first moment.")
    beta2: Fraction = Field(0.95, description="Decay of the second moment.")
    eps: PositiveFloat = Field(1e-8, description="AdamW: term in the denominator. adam-atan2: floor of sqrt(v).")
    weight_decay: NonNegativeFloat = Field(0.01, description="Decoupled weight decay; norms and biases have none.")
    update_clipping: bool = Field(
        False, description="adam-atan2 only: limit each tensor's update by its RMS g/sqrt(v)."
    )
    lr_schedule: Literal["constant", "linear", "cosine", "trapezoid"] = Field(
        "trapezoid", description="Shape of the learning rate after warm-up."
    )
    warmup_steps: NonNegativeInt = Field(0, description="Optimizer steps of linear warm-up.")
    cooldown_steps: NonNegativeInt = Field(0, description="trapezoid: optimizer steps of linear decay at the end.")
    gradient_clipping: NonNegativeFloat = Field(1.0, description="Largest global gradient norm; 0 does not clip.")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="auto: bf16 where the hardware computes in it, else fp32."
    )
    activation_checkpointing: Literal["none", "per_iteration"] = Field(
        "none", description="per_iteration keeps only the state between core iterations and recomputes the rest."
    )
    compile: bool | Literal["auto"] = Field("auto", description="torch.compile of the blocks; auto: where it pays.")
    max_nonfinite_steps: NonNegativeInt = Field(
        8, description="Skipped steps in a row (NaN, inf) before the run stops."
    )

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _no_reentrant_checkpointing(cls, value: Any) -> Any:
        if value == "reentrant":
            raise ValueError(
                "reentrant checkpointing computes the gradient of reused weights more than once, which ZeRO 2 and 3 "
                "refuse; use per_iteration (non-reentrant)"
            )
        return value


class DistributedSection(Section):
    """Ranks, how they meet and how ZeRO shards."""

    backend: Annotated[Literal["auto", "nccl", "gloo", "mpi"], BeforeValidator(lower_case)] = Field(
        "auto", description="Collectives: auto takes nccl with GPUs and gloo without."
    )
    init_method: str = Field("env://", description="Rendezvous: env:// or tcp://host:port.")
    zero_stage: Literal["auto", 0, 1, 2, 3] = Field("auto", description="ZeRO stage; auto takes the lowest that fits.")
    ranks_per_node: PositiveInt | Literal["auto"] = Field("auto", description="auto: one a GPU, or 2 without a GPU.")
    timeout_s: PositiveFloat = Field(900.0, description="Longest wait for a collective, in seconds.")

    @field_validator("init_method")
    @classmethod
    def _init_method_is_known(cls, value: str) -> str:
        if value == "env://":
            return value
        match = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:]+\]|[^\s/:]+):(\d{1,5})", value)
        if not match or not 0 < int(match.group(2)) < 65536:
            raise ValueError(f"{value!r} is neither env:// nor tcp://host:port")
        return value


class CheckpointSection(Section):
    """When the run is saved, where to, what is kept, and when it goes back to an earlier save."""

    interval_steps: PositiveInt | Literal["auto"] | None = Field(
        "auto",
        description="Save every so many steps; auto: sqrt(2 x cost of a save x time between failures), as measured "
        "in the run; null saves at the end only (or by interval_minutes).",
    )
    interval_minutes: PositiveFloat | None = Field(
        None, description="Save every so many minutes instead; wins over auto."
    )
    gpu_hours_between_failures: PositiveFloat = Field(
        50000.0, description="For auto: device hours between two failures; lower it for spot nodes and old hardware."
    )
    asynchronous: bool = Field(True, description="Write and upload beside training; false waits for each save.")
    keep_last: PositiveInt = Field(3, description="Newest checkpoints that are kept.")
    keep_every_steps: PositiveInt | None = Field(None, description="Also keep those at multiples of so many steps.")
    keep_best: NonNegativeInt = Field(1, description="Also keep so many with the lowest held-out loss.")
    remote: str | None = Field(
        None, description="s3://bucket/prefix: also upload to an object store, under PREFIX/NAME of the run."
    )
    endpoint_url: str | None = Field(None, description="Address of an S3-compatible store; null is AWS.")
    upload_concurrency: PositiveInt = Field(8, description="Requests to the store at the same time.")
    upload_part_mib: Annotated[int, Field(ge=5, le=4096, strict=True)] = Field(
        32, description="Size of the parts of large files, in MiB; so many are in memory as there are requests."
    )
    watch_spot: Literal["auto"] | bool = Field(
        "auto", description="Watch the EC2 metadata service for spot notices; auto: on EC2 instances."
    )
    metadata_url: str = Field("http://169.254.169.254", description="Address of the EC2 metadata service.")
    max_rollbacks: NonNegativeInt = Field(
        3, description="Times a run goes back to its last good checkpoint after a loss spike; 0 never does."
    )
    spike_deviations: PositiveFloat = Field(
        8.0, description="Spike: loss above its running mean by so many mean deviations (and by spike_ratio)."
    )
    spike_ratio: Annotated[float, Field(gt=1, allow_inf_nan=False)] = Field(
        1.3, description="Spike: loss above its running mean by this factor (and by spike_deviations)."
    )
    spike_patience_steps: PositiveInt = Field(4, description="Bad steps in a row before the run goes back.")

    @field_validator("remote")
    @classmethod
    def _remote_is_an_s3_address(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s?#@]*)?", value):
            raise ValueError(
                f"{value!r} is not of the form s3://bucket/prefix; credentials come from the AWS chain, never from here"
            )
        return value

    @field_validator("endpoint_url", "metadata_url")
    @classmethod
    def _address_is_plain_http(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^\s/@?#]+/?", value):
            raise ValueError(f"{value!r} is not of the form http(s)://host:port; it holds no path and no credentials")
        return value

    @model_validator(mode="after")
    def _one_interval(self) -> CheckpointSection:
        if isinstance(self.interval_steps, int) and self.interval_minutes is not None:
            raise ValueError("interval_steps and interval_minutes are both given; keep one of them")
        return self


class EvaluationSection(Section):
    """Held-out perplexity and samples."""

    interval_steps: PositiveInt | None = Field(None, description="Evaluate every so many steps; null: at the end only.")
    recurrences: tuple[PositiveInt, ...] = Field((1, 4, 8, 16), description="Iteration counts in the closing table.")
    max_sequences: PositiveInt = Field(256, description="Held-out sequences an evaluation reads.")
    prompt: str = Field("The ", description="Beginning of the sample that the run writes at its end.")
    sample_tokens: NonNegativeInt = Field(64, description="Length of that sample; 0 writes none.")


class MonitoringSection(Section):
    """What the run reports while it goes."""

    log_interval_steps: PositiveInt = Field(10, description="Steps between two log lines and metrics records.")
    port: Annotated[int, Field(gt=0, lt=65536, strict=True)] | Literal["auto"] | None = Field(
        "auto",
        description="Port of rank 0's metrics for Prometheus; auto: 9401, or any when that is taken; null: none.",
    )
    host: str = Field(
        "auto", description="Address the metrics are served at; auto: the one that reaches the other nodes, never all."
    )
    cluster: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = Field(
        "local", description="Name of the cluster in metrics and alerts."
    )
    textfile_dir: str | None = Field(
        None, description="Folder of node_exporter's textfile collector, for each node's own pace; null: none."
    )
    job_mapping_dir: str | None = Field(
        None,
        description="Folder that dcgm-exporter reads (--hpc-job-mapping-dir), so that GPU metrics name the run; "
        "null, or a folder that is not there: none.",
    )
    communication_sampling: Fraction = Field(
        0.005,
        description="Share of the time that profiling single steps for exposed communication may cost; 0 does none.",
    )


class RunConfig(Section):
    """A whole run: validated once, frozen, the same object on the control side and in every rank."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    training: TrainingSection = Field(default_factory=TrainingSection)
    distributed: DistributedSection = Field(default_factory=DistributedSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    monitoring: MonitoringSection = Field(default_factory=MonitoringSection)
    prepare: PrepareSection = Field(default_factory=PrepareSection)
