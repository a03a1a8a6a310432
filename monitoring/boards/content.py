"""The four boards: Cluster, Run, Node, Queue."""

from __future__ import annotations

from monitoring.boards.model import GOAL_90, Board, Panel, Query, line, number

_R = '{cluster=~"$cluster", run=~"$run"}'
_N = '{cluster=~"$cluster", node=~"$node"}'
_C = '{cluster=~"$cluster"}'
_WHOLE_DISKS = 'fstype!~"tmpfs|ramfs|overlay|squashfs"'

CLUSTER = Board(
    "loopworks-cluster",
    "Loopworks / Cluster",
    "The fleet at a glance: is the money being turned into training?",
    (
        (
            "Now",
            (
                number("Runs in training", "short", 'sum(train_phase{cluster=~"$cluster", phase="training"})'),
                number("GPU utilisation", "percent", f"avg(DCGM_FI_DEV_GPU_UTIL{_C})", GOAL_90),
                number(
                    "Tensor pipe active",
                    "percentunit",
                    f"avg(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{_C})",
                    ((None, "red"), (0.02, "orange"), (0.2, "green")),
                    "Utilisation without it is waiting that looks like work.",
                ),
                number(
                    "Alerts firing",
                    "short",
                    'count(ALERTS{alertstate="firing"}) or vector(0)',
                    ((None, "green"), (1.0, "red")),
                ),
                number("Nodes that answer", "short", 'sum(up{job="node", cluster=~"$cluster"})'),
                number("Power", "watt", f"sum(DCGM_FI_DEV_POWER_USAGE{_C})"),
            ),
        ),
        (
            "Runs",
            (
                line("Loss", "short", f"train_loss{_C}", "{{run}}", "Nats a token."),
                line("Tokens a second", "short", f"train_tokens_per_second{_C}", "{{run}}"),
                line("MFU", "percentunit", f"train_mfu_ratio{_C}", "{{run}}", minimum=0),
                line(
                    "Exposed communication",
                    "percentunit",
                    'run:phase:ratio5m{cluster=~"$cluster", phase="communication"}',
                    "{{run}}",
                    "Time in collectives that no computation covers. Goal: below 10 %.",
                    minimum=0,
                ),
                line("Goodput", "percentunit", f"run:goodput:ratio{_C}", "{{run}}", minimum=0, maximum=1),
                line("Phase of each run", "short", "loopworks_run_phase == 1", "{{run}} {{phase}}"),
            ),
        ),
        (
            "Nodes",
            (
                line(
                    "GPU utilisation by node", "percent", f"node:gpu_util:mean{_C}", "{{node}}", minimum=0, maximum=100
                ),
                line(
                    "Fabric, share of line rate", "percentunit", f"node:fabric_use:ratio5m{_C}", "{{node}}", minimum=0
                ),
                line("Hottest GPU", "celsius", f"max by (node) (DCGM_FI_DEV_GPU_TEMP{_C})", "{{node}}"),
                line(
                    "Disk in use",
                    "percentunit",
                    f'1 - min by (node) (node_filesystem_avail_bytes{{cluster=~"$cluster", {_WHOLE_DISKS}}}'
                    " / node_filesystem_size_bytes)",
                    "{{node}}",
                    minimum=0,
                    maximum=1,
                ),
            ),
        ),
    ),
    (("cluster", "up", "cluster"),),
)

RUN = Board(
    "loopworks-run",
    "Loopworks / Run",
    "One run: what it learns, how fast, and where its time goes.",
    (
        (
            "Now",
            (
                number("Step", "short", f"max(train_step{_R})"),
                number("Loss", "short", f"min(train_loss{_R})"),
                number("Tokens a second", "short", f"max(train_tokens_per_second{_R})"),
                number("MFU", "percentunit", f"max(train_mfu_ratio{_R})"),
                number("Goodput", "percentunit", f"min(run:goodput:ratio{_R})"),
                number(
                    "Since the last step",
                    "s",
                    f"max(time() - train_heartbeat_timestamp_seconds{_R})",
                    ((None, "green"), (120.0, "orange"), (600.0, "red")),
                ),
            ),
        ),
        (
            "Learning",
            (
                line(
                    "Loss", "short", f"train_loss{_R}", "{{run}}", "Nats a token; gaps are steps that were not finite."
                ),
                line("Held-out perplexity by r", "short", f"train_perplexity{_R}", "r={{recurrence}}"),
                line("Gradient norm", "short", f"train_grad_norm{_R}", "{{run}}"),
                line("Learning rate", "short", f"train_learning_rate{_R}", "{{run}}"),
                Panel(
                    "Recurrence",
                    "short",
                    (Query(f"train_recurrence_depth{_R}", "mean iterations"),),
                    about="Mean core iterations of the last log interval.",
                ),
                Panel(
                    "Health of the recurrence",
                    "percentunit",
                    (
                        Query(f"train_token_correlation_ratio{_R}", "correlation of token states"),
                        Query(f"train_state_change_ratio{_R}", "change in the last iteration"),
                    ),
                    about="Correlation near 1: the states of all tokens have become one.",
                ),
            ),
        ),
        (
            "Speed",
            (
                Panel(
                    "Where the time goes",
                    "percentunit",
                    (Query(f"run:phase:ratio5m{_R}", "{{phase}}"),),
                    kind="stack",
                    about="Shares of wall time over five minutes. Communication: only what computation does not cover.",
                    maximum=1,
                ),
                Panel(
                    "Step time",
                    "s",
                    (
                        Query(f"run:step_seconds:mean5m{_R}", "mean"),
                        Query(
                            f"histogram_quantile(0.95, sum by (le) (rate(train_step_seconds_bucket{_R}[5m])))",
                            "95th percentile",
                        ),
                    ),
                    minimum=0,
                ),
                line("Tokens a second", "short", f"run:tokens:rate5m{_R}", "{{run}}", minimum=0),
                line("FLOP a second", "flops", f"train_flop_per_second{_R}", "{{run}}", minimum=0),
                line("GPU utilisation", "percent", f"run:gpu_util:mean{_R}", "{{run}}", minimum=0, maximum=100),
                line(
                    "Exposed communication, samples",
                    "percentunit",
                    f"train_communication_ratio{_R}",
                    "{{run}}",
                    minimum=0,
                ),
            ),
        ),
        (
            "Safety",
            (
                line(
                    "Work at risk",
                    "s",
                    f"time() - train_checkpoint_last_success_timestamp_seconds{_R}",
                    "{{run}}",
                    "Age of the newest checkpoint.",
                    minimum=0,
                ),
                Panel(
                    "Silence of ranks and nodes",
                    "s",
                    (
                        Query(f"time() - loopworks_run_heartbeat_timestamp_seconds{_R}", "ranks of {{node}}"),
                        Query(f"time() - loopworks_run_node_report_timestamp_seconds{_R}", "agent of {{node}}"),
                    ),
                    minimum=0,
                    about="Since the last sign of life: of the most silent rank of each node, and of its agent.",
                ),
                Panel(
                    "A save",
                    "s",
                    (
                        Query(f"train_checkpoint_stall_seconds{_R}", "the loop waits"),
                        Query(f"train_checkpoint_write_seconds{_R}", "writing, beside the loop"),
                    ),
                    minimum=0,
                ),
                Panel(
                    "Faults",
                    "short",
                    (
                        Query(f"train_nonfinite_total{_R}", "steps not finite"),
                        Query(f"train_rollbacks_total{_R}", "rollbacks"),
                        Query(f"train_checkpoint_failures_total{_R}", "failed saves"),
                        Query(f"train_health_alarms_total{_R}", "health alarms"),
                        Query(f"sum by (reason) (train_restarts_total{_R})", "restarts: {{reason}}"),
                    ),
                    minimum=0,
                ),
                line("Goodput", "percentunit", f"run:goodput:ratio{_R}", "{{run}}", minimum=0, maximum=1),
            ),
        ),
    ),
    (("cluster", "train_phase", "cluster"), ("run", "train_phase", "run")),
)

NODE = Board(
    "loopworks-node",
    "Loopworks / Node",
    "One node: GPUs, fabric, storage, health.",
    (
        (
            "GPUs",
            (
                line("Utilisation", "percent", f"DCGM_FI_DEV_GPU_UTIL{_N}", "GPU {{gpu}}", minimum=0, maximum=100),
                Panel(
                    "Work",
                    "percentunit",
                    (
                        Query(f"avg(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{_N})", "tensor pipe"),
                        Query(f"avg(DCGM_FI_PROF_SM_ACTIVE{_N})", "multiprocessors"),
                        Query(f"avg(DCGM_FI_PROF_DRAM_ACTIVE{_N})", "memory"),
                    ),
                    minimum=0,
                    maximum=1,
                ),
                line("Memory in use", "mbytes", f"DCGM_FI_DEV_FB_USED{_N}", "GPU {{gpu}}", minimum=0),
                line("Clock", "rotmhz", f"DCGM_FI_DEV_SM_CLOCK{_N}", "GPU {{gpu}}", minimum=0),
                line("Temperature", "celsius", f"DCGM_FI_DEV_GPU_TEMP{_N}", "GPU {{gpu}}"),
                line("Power", "watt", f"DCGM_FI_DEV_POWER_USAGE{_N}", "GPU {{gpu}}", minimum=0),
                line(
                    "Throttled for heat",
                    "percentunit",
                    f"rate(DCGM_FI_DEV_THERMAL_VIOLATION{_N}[5m]) / 1e6",
                    "GPU {{gpu}}",
                    minimum=0,
                ),
                Panel(
                    "Memory errors and XIDs",
                    "short",
                    (
                        Query(f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{_N}", "uncorrectable, GPU {{gpu}}"),
                        Query(f"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS{_N}", "remapped rows, GPU {{gpu}}"),
                        Query(f"loopworks_gpu_xid_total{_N}", "XID {{xid}}, GPU {{gpu}}"),
                    ),
                    minimum=0,
                ),
            ),
        ),
        (
            "Fabric",
            (
                Panel(
                    "EFA and InfiniBand",
                    "Bps",
                    (
                        Query(f"node:fabric_transmit:rate5m{_N}", "sent"),
                        Query(f"node:fabric_receive:rate5m{_N}", "received"),
                        Query(f"node:fabric_line_rate{_N}", "line rate"),
                    ),
                    minimum=0,
                ),
                Panel(
                    "NVLink",
                    "Bps",
                    (
                        Query(f"sum(DCGM_FI_PROF_NVLINK_TX_BYTES{_N})", "sent"),
                        Query(f"sum(DCGM_FI_PROF_NVLINK_RX_BYTES{_N})", "received"),
                    ),
                    minimum=0,
                ),
                Panel(
                    "Fabric errors",
                    "cps",
                    (
                        Query(f"rate(loopworks_fabric_errors_total{_N}[5m])", "errors {{device}}"),
                        Query(f"rate(loopworks_fabric_retransmits_total{_N}[5m])", "retransmits {{device}}"),
                    ),
                    minimum=0,
                ),
                Panel(
                    "Ethernet (no RDMA traffic)",
                    "Bps",
                    (
                        Query(f"sum(rate(node_network_transmit_bytes_total{_N}[5m]))", "sent"),
                        Query(f"sum(rate(node_network_receive_bytes_total{_N}[5m]))", "received"),
                    ),
                    minimum=0,
                ),
            ),
        ),
        (
            "Storage and health",
            (
                line(
                    "Disk free",
                    "bytes",
                    f'node_filesystem_avail_bytes{{cluster=~"$cluster", node=~"$node", {_WHOLE_DISKS}}}',
                    "{{mountpoint}}",
                    minimum=0,
                ),
                Panel(
                    "Disk traffic",
                    "Bps",
                    (
                        Query(f"sum(rate(node_disk_read_bytes_total{_N}[5m]))", "read"),
                        Query(f"sum(rate(node_disk_written_bytes_total{_N}[5m]))", "written"),
                    ),
                    minimum=0,
                ),
                line("Memory available", "bytes", f"node_memory_MemAvailable_bytes{_N}", "{{node}}", minimum=0),
                line(
                    "Processors busy",
                    "percentunit",
                    '1 - avg(rate(node_cpu_seconds_total{cluster=~"$cluster", node=~"$node", mode="idle"}[5m]))',
                    "busy",
                    minimum=0,
                    maximum=1,
                ),
                line(
                    "Health checks",
                    "short",
                    f"loopworks_health_check_status{_N}",
                    "{{check}}",
                    "0 ok, 1 warning, 2 failed.",
                ),
                line("Time of a step without waiting", "s", f"loopworks_node_busy_seconds{_N}", "{{run}}", minimum=0),
            ),
        ),
    ),
    (("cluster", "up", "cluster"), ("node", "up", "node")),
)

QUEUE = Board(
    "loopworks-queue",
    "Loopworks / Queue",
    "Jobs that wait, nodes that are wanted, money that is spent.",
    (
        (
            "Queue",
            (
                line("Jobs", "short", f"loopworks_queue_jobs{_C}", "{{state}}", minimum=0),
                line("Oldest waiting job", "s", f"loopworks_queue_oldest_wait_seconds{_C}", "waits", minimum=0),
                Panel(
                    "Nodes",
                    "short",
                    (
                        Query(f"loopworks_queue_nodes_wanted{_C}", "wanted by waiting jobs"),
                        Query(f"loopworks_queue_nodes_ready{_C}", "ready"),
                    ),
                    minimum=0,
                ),
                Panel(
                    "Money",
                    "currencyUSD",
                    (
                        Query(f"loopworks_spend_dollars{_C}", "spent, {{run}}"),
                        Query(f"loopworks_budget_dollars{_C}", "budget, {{run}}"),
                    ),
                    minimum=0,
                ),
            ),
        ),
    ),
    (("cluster", "loopworks_queue_jobs", "cluster"),),
)

BOARDS = (CLUSTER, RUN, NODE, QUEUE)
