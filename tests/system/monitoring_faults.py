"""Which alert is set off by which fault, in live runs and at the stand-in exporters: together all that there are."""

from __future__ import annotations

# Runs of test_monitoring_run.py, by name, and the alerts that their faults set off.
HEALTHY_RUN_THEN_STOPPED = ("TrainingHeartbeatLost", "RunFailed")
SICK_RUN = ("TrainingNonFinite", "DataWaitHigh", "CommunicationShareHigh", "CheckpointStale")
SICK_RUN_WITHOUT_RANK_0 = ("TrainingTargetDown",)
SPIKING_RUN = ("TrainingLossSpike", "TrainingRolledBack")
STUCK_RUN = ("RecurrenceUnhealthy", "TrainingLossNotFalling", "TrainingGoodputLow")
FULL_DISK = ("DiskFull", "CheckpointFailed")
# The slow rank is on node n1. The run as a whole waits for the network, which carries nothing on either node.
UNEVEN_RUN = {"NodeStraggler": {"n1"}, "NetworkBelowLineRate": {"n0", "n1"}}
SILENT_NODE = ("NodeSilent",)
RESTARTED_RUN = ("RunRestarting",)
SICK_NODE = ("SpotNotice", "HealthCheckFailed", "FabricCountersMissing")
DEAD_NODE = ("TargetDown",)

# test_monitoring_alerts.py: series of dcgm-exporter, node_exporter and the queue, made by monitoring_standin.py.
AT_THE_STANDIN = (
    *("GpuUtilizationLow", "GpuUtilizationVeryLow", "GpuHung", "GpuExporterFault", "GpuXidFatal", "GpuXidApplication"),
    *("GpuEccUncorrectable", "GpuRowRemapFailure", "GpuThermalThrottle", "GpuClockStraggler", "GpuPcieReplays"),
    *("FabricPortDown", "FabricErrors", "DiskFilling", "NodeFactsStale", "HealthChecksStale", "ClockOffset"),
    *("QueueWaiting", "QueueDeadLetters", "BudgetNear", "BudgetExceeded"),
)
WITHOUT_FABRIC = ("FabricAbsent",)
SLOW_RULES = ("RulesSlow",)

INJECTED = (
    *(*HEALTHY_RUN_THEN_STOPPED, *SICK_RUN, *SICK_RUN_WITHOUT_RANK_0, *SPIKING_RUN, *STUCK_RUN, *FULL_DISK),
    *(*UNEVEN_RUN, *SILENT_NODE, *RESTARTED_RUN, *SICK_NODE, *DEAD_NODE),
    *(*AT_THE_STANDIN, *WITHOUT_FABRIC, *SLOW_RULES),
)
