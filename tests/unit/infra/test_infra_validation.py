"""Each wrong configuration is refused with its key, its cause and a remedy, before anything is called."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import pytest
import yaml

from infra.account import AccountFacts, Image, pick_zone, read_account
from infra.check import main as check_main
from infra.config import ClusterConfig, camel_keys, from_strings, load_stack_file, parse, project_file, schema_block
from infra.findings import InfraError, errors_of
from infra.validate import check_account, check_config
from infra.validate.account import vcpus_needed

INFRA = Path(__file__).parents[3] / "infra"
NOW = dt.datetime(2026, 12, 1, tzinfo=dt.timezone.utc)
GOOD = {
    "allowedCidrs": ["203.0.113.0/24"],
    "owner": "team",
    "monthlyBudgetUsd": 100,
    "alertEmails": ["a@example.org"],
    "fsxS3Prefix": "data",
}
BLOCK = {
    "instanceType": "p5.48xlarge",
    "capacity": "capacity-block",
    "reservationId": "cr-0123456789abcdef0",
    "capacityBlockStart": "2026-11-30T11:30:00Z",
    "capacityBlockEnd": "2026-12-07T11:30:00Z",
}
FSX_EFA = {"fsxEfa": True, "instanceType": "p5.48xlarge", "fsxMetadataIops": 6000, "fsxThroughput": 1000}


def findings_of(overrides):
    return check_config(parse({**GOOD, **overrides}), now=NOW)


def test_the_base_configuration_has_no_findings():
    assert findings_of({}) == []
    assert findings_of(BLOCK) == []
    assert findings_of({**FSX_EFA, "fsxCapacityGib": 4800}) == []


WRONG = [
    ({"instanceType": "p4d.24xlarg"}, "instanceType", "did you mean p4d.24xlarge"),
    ({"headInstanceType": "z9.big"}, "headInstanceType", "not in the catalogue"),
    ({"elasticInstanceType": "z9.big", "elasticMax": 1}, "elasticInstanceType", "not in the catalogue"),
    ({"efa": "always", "instanceType": "g5.xlarge"}, "efa", "has no EFA"),
    ({"gpuPublicIp": True}, "gpuPublicIp", "starts with 5 interfaces"),
    ({"gpuPublicIp": True, "instanceType": "g5.48xlarge", "elasticMax": 1, "elasticInstanceType": "g6e.48xlarge"},
     "elasticInstanceType", "starts with 5 interfaces"),
    ({"placementGroup": "always", "instanceType": "t3.medium"}, "placementGroup", "cannot enter"),
    ({"elasticMax": 2, "elasticInstanceType": "p5.48xlarge"}, "elasticInstanceType", "cannot talk to each other"),
    ({"elasticMax": 2, "elasticInstanceType": "g5.xlarge"}, "elasticInstanceType", "has EFA, the other has none"),
    ({"amiId": "ami-latest"}, "amiId", "not an image id"),
    ({"headAmiId": "ubuntu"}, "headAmiId", "not an image id"),
    ({"amiParameter": "aws/service/x"}, "amiParameter", "not a parameter path"),
    ({"rootVolumeGib": 50}, "rootVolumeGib", "less than the Deep Learning AMI"),
    ({"instanceType": "g5.xlarge", "capacity": "capacity-block"}, "capacity", "cannot be had as capacity-block"),
    ({"instanceType": "p5e.48xlarge"}, "capacity", "no on-demand price"),
    ({"reservationId": "cr-0123456789abcdef0"}, "reservationId", "does not use it"),
    ({"capacity": "reservation", "reservationId": "r-1"}, "reservationId", "not a reservation id"),
    ({"capacity": "reservation", "nodeCount": 0}, "nodeCount", "a reservation of no instances"),
    ({"capacityBlockStart": "2027-01-01T11:30:00Z"}, "capacity", "without capacity: capacity-block"),
    ({**BLOCK, "placementGroup": "always"}, "placementGroup", "brings its own placement"),
    ({**BLOCK, "reservationId": ""}, "reservationId", "exactly one of"),
    ({**BLOCK, "reservationId": "", "capacityBlockOfferingId": "cbr-1"},
     "confirmCapacityBlockPurchase", "cannot be cancelled"),
    ({**BLOCK, "nodeCount": 65}, "nodeCount", "at most 64"),
    ({**BLOCK, "capacityBlockStart": "tomorrow"}, "capacityBlockStart", "not a UTC time"),
    ({**BLOCK, "capacityBlockStart": "2026-12-01T11:30:00"}, "capacityBlockStart", "not a UTC time"),
    ({**BLOCK, "capacityBlockEnd": ""}, "capacityBlockEnd", "not both known"),
    ({**BLOCK, "capacityBlockEnd": "2026-12-07T12:00:00Z"}, "capacityBlockEnd", "11:30 UTC"),
    ({**BLOCK, "capacityBlockEnd": "2026-11-29T11:30:00Z"}, "capacityBlockEnd", "not after the start"),
    ({**BLOCK, "capacityBlockEnd": "2026-12-16T11:30:00Z"}, "capacityBlockEnd", "16 days is not sold"),
    ({**BLOCK, "capacityBlockStart": "2026-11-20T11:30:00Z", "capacityBlockEnd": "2026-11-30T11:30:00Z"},
     "capacityBlockEnd", "the block is over"),
    ({**BLOCK, "capacityBlockStart": "2026-12-02T11:30:00Z", "capacityBlockEnd": "2026-12-09T11:30:00Z"},
     "nodeCount", "fixed nodes cannot start before"),
    ({"vpcCidr": "10.40.0.0"}, "vpcCidr", "/16 to /28"),
    ({"vpcCidr": "10.40.0.1/16"}, "vpcCidr", "not an IPv4 network"),
    ({"vpcCidr": "10.0.0.0/8"}, "vpcCidr", "/16 to /28"),
    ({"vpcCidr": "8.8.0.0/16"}, "vpcCidr", "public address space"),
    ({"gpuSubnetCidr": "10.50.0.0/20"}, "gpuSubnetCidr", "outside the VPC"),
    ({"gpuSubnetCidr": "10.40.0.0/30"}, "gpuSubnetCidr", "/16 to /28"),
    ({"publicSubnetCidr": "10.40.1.0/24"}, "publicSubnetCidr", "overlaps"),
    ({"gpuSubnetCidr": "10.40.0.0/27", "nodeCount": 30}, "gpuSubnetCidr", "use /26 or larger"),
    ({"availabilityZone": "eu-west-1a"}, "availabilityZone", "not in us-east-1"),
    ({"interfaceEndpoints": ["s33"]}, "interfaceEndpoints", "unknown: s33"),
    ({"interfaceEndpoints": ["ssm", "ssm"]}, "interfaceEndpoints", "named twice"),
    ({"natGateway": False}, "interfaceEndpoints", "Session Manager needs"),
    ({"logRetentionDays": 31}, "logRetentionDays", "does not know 31"),
    ({"allowedCidrs": ["0.0.0.0/0"]}, "allowedCidrs", "opens the port to the world"),
    ({"redisCidrs": ["0.0.0.0/0"]}, "redisCidrs", "opens the port to the world"),
    ({"allowedCidrs": ["0.0.0.0/1", "128.0.0.0/1"]}, "allowedCidrs", "wider than /8"),
    ({"allowedCidrs": ["::/0"]}, "allowedCidrs", "IPv6"),
    ({"allowedCidrs": ["office"]}, "allowedCidrs", "not a network"),
    ({"sshPublicKey": "-----BEGIN OPENSSH PRIVATE KEY-----"}, "sshPublicKey", "private key"),
    ({"sshPublicKey": "ssh-ed25519 nonsense"}, "sshPublicKey", "not an OpenSSH public key"),
    ({"sshPublicKey": "ecdsa-sha2-nistp256 AAAA"}, "sshPublicKey", "not an OpenSSH public key"),
    ({"keyName": "k", "sshPublicKey": "ssh-ed25519 AAAA"}, "keyName", "exclude each other"),
    ({"ssm": False}, "sshPublicKey", "nobody gets in"),
    ({"ssm": False, "keyName": "k", "headPublicIp": False}, "headPublicIp", "no public address"),
    ({"sshUser": "root; rm"}, "sshUser", "not a user name"),
    ({"redisPassword": "short"}, "redisPassword", "shorter than 16"),
    ({"alertEmails": ["nobody"]}, "alertEmails", "not a mail address"),
    ({"alertEmails": []}, "alertEmails", "tells nobody"),
    ({"kmsKeyArn": "key"}, "kmsKeyArn", "not the ARN"),
    ({"fsxCapacityGib": 1000}, "fsxCapacityGib", "not a size"),
    ({"fsxCapacityGib": 3600}, "fsxCapacityGib", "for example 2400 or 4800"),
    ({"fsxThroughput": 333}, "fsxThroughput", "does not take 333"),
    ({"fsxDeployment": "SCRATCH_2", "fsxThroughput": 125}, "fsxThroughput", "does not take 125"),
    ({"fsxVersion": "2.10"}, "fsxVersion", "does not take Lustre 2.10"),
    ({**FSX_EFA, "fsxCapacityGib": 2400}, "fsxCapacityGib", "multiple of 4800"),
    ({**FSX_EFA, "fsxCapacityGib": 4800, "fsxMetadataIops": 0}, "fsxEfa", "provisioned metadata IOPS"),
    ({"fsxMetadataIops": 2000}, "fsxMetadataIops", "not a step"),
    ({"fsxDeployment": "SCRATCH_2", "fsxThroughput": 0, "fsxMetadataIops": 1500}, "fsxMetadataIops", "has none"),
    ({"fsxDeployment": "PERSISTENT_1", "fsxThroughput": 100}, "fsxS3Prefix", "no data repository association"),
    ({"fsxS3Prefix": "/data"}, "fsxS3Prefix", "slash"),
    ({"sharedStorage": "efs", "fsxEfa": True}, "fsxEfa", "sharedStorage is efs"),
    ({"name": "Loop_Works"}, "name", "not usable"),
    ({"name": "a"}, "name", "characters"),
    ({"name": "a-very-long-name-for-a-cluster"}, "name", "30 characters"),
    ({"name": "sg-lab"}, "name", "a word that AWS keeps"),
    ({"name": "aws-lab"}, "name", "a word that AWS keeps"),
    ({"region": "virginia"}, "aws:region", "not a region of the commercial partition"),
    ({"region": "us-gov-west-1"}, "aws:region", "not a region of the commercial partition"),
    ({"region": "cn-north-1"}, "aws:region", "GovCloud or China"),
    ({"checkpointBucket": "My_Bucket"}, "checkpointBucket", "not a bucket name"),
    ({"checkpointBucket": "ab-s3alias"}, "checkpointBucket", "reserved by S3"),
    ({"mountPoint": "shared"}, "mountPoint", "not an absolute path"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "key", "message"), WRONG, ids=[f"{i:02d}-{row[1]}" for i, row in enumerate(WRONG)]
)
def test_wrong_configurations_are_refused(overrides, key, message):
    found = [finding for finding in errors_of(findings_of(overrides)) if finding.key == key]
    assert any(message in f"{finding.cause} {finding.remedy}" for finding in found), findings_of(overrides)
    assert all(finding.remedy for finding in found)


DOUBTFUL = [
    ({"owner": ""}, "owner", "nobody is named"),
    ({"vpcCidr": "172.17.0.0/16", "gpuSubnetCidr": "172.17.0.0/20", "publicSubnetCidr": "172.17.240.0/24"},
     "vpcCidr", "Docker"),
    ({"natGateway": False, "interfaceEndpoints": ["ssm", "ssmmessages", "ec2messages"]},
     "natGateway", "no package index"),
    ({"monthlyBudgetUsd": 0}, "monthlyBudgetUsd", "no budget"),
    ({"allowedCidrs": []}, "allowedCidrs", "nobody may reach"),
    ({"headPublicIp": False}, "sshPublicKey", "even through Session Manager"),
    ({"efa": "never"}, "efa", "TCP only"),
    ({"placementGroup": "never"}, "placementGroup", "far from each other"),
    ({"elasticMax": 1, "elasticInstanceType": "p4de.24xlarge"}, "elasticInstanceType", "two types in one"),
    ({"nodeUpdates": "replace"}, "nodeUpdates", "may replace running nodes"),
    ({"capacity": "reservation", "reservationId": "cr-0123456789abcdef0"}, "placementGroup", "made inside"),
    ({"fsxVersion": "2.12"}, "fsxVersion", "use 2.15"),
    ({**FSX_EFA, "fsxCapacityGib": 4800, "instanceType": "p4d.24xlarge"}, "fsxEfa", "over TCP"),
    ({"fsxDeployment": "SCRATCH_2", "fsxThroughput": 0, "fsxS3Prefix": ""}, "fsxS3Prefix", "nothing leaves"),
    ({"sharedStorage": "none"}, "sharedStorage", "without shared storage"),
    ({"sharedStorage": "efs", "nodeCount": 9}, "sharedStorage", "9 nodes on efs"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key", "message"), DOUBTFUL, ids=[row[1] for row in DOUBTFUL])
def test_doubtful_configurations_warn(overrides, key, message):
    findings = findings_of(overrides)
    assert errors_of(findings) == []
    assert any(finding.key == key and message in f"{finding.cause} {finding.remedy}" for finding in findings), findings


def test_all_faults_are_told_at_once():
    keys = {
        finding.key
        for finding in findings_of(
            {
                "name": "X",
                "fsxCapacityGib": 7,
                "allowedCidrs": ["0.0.0.0/0"],
                "efa": "always",
                "instanceType": "g5.xlarge",
                "vpcCidr": "9.9.9.9/8",
            }
        )  # fmt: skip
    }
    assert {"name", "fsxCapacityGib", "allowedCidrs", "efa", "vpcCidr"} <= keys


IMAGE = Image("ami-0123456789abcdef0", "x86_64", "uefi-preferred", 75)
FACTS = AccountFacts(
    zones=("us-east-1a", "us-east-1b"),
    offered_zones={"p4d.24xlarge": ("us-east-1b",), "m7i.large": ("us-east-1a", "us-east-1b")},
    quotas_vcpus={"L-417A185B": 192, "L-1216C47A": 32},
    gpu_image=IMAGE,
    head_image=IMAGE,
)


def account_findings(overrides, **facts):
    return check_account(parse({**GOOD, **overrides}), AccountFacts(**{**FACTS.__dict__, **facts}))


def test_a_fitting_account_has_no_findings():
    assert account_findings({}) == []
    assert pick_zone(parse(GOOD), FACTS) == "us-east-1b"


ACCOUNT = [
    ({"nodeCount": 3}, {}, "nodeCount", "needs 288 vCPUs of quota L-417A185B, the account has 192"),
    ({"elasticMax": 1}, {}, "nodeCount", "needs 288 vCPUs"),
    ({"capacity": "spot"}, {"quotas_vcpus": {"L-7212CCBC": 96}}, "nodeCount", "L-7212CCBC"),
    ({"availabilityZone": "us-east-1a"}, {}, "availabilityZone", "us-east-1a does not offer p4d.24xlarge"),
    ({"availabilityZone": "us-east-1z"}, {}, "availabilityZone", "not available"),
    ({}, {"offered_zones": {"p4d.24xlarge": (), "m7i.large": ("us-east-1a",)}}, "instanceType", "does not offer"),
    ({}, {"offered_zones": {"p4d.24xlarge": ("a",), "m7i.large": ("b",)}}, "availabilityZone", "together"),
    ({}, {"offered_zones": {}}, "availabilityZone", "set availabilityZone"),
    ({}, {"gpu_image": None}, "amiId", "no image"),
    ({}, {"gpu_image": Image("ami-1", "x86_64", "uefi", 75)}, "amiId", "by UEFI only"),
    ({}, {"gpu_image": Image("ami-1", "arm64", "uefi-preferred", 75)}, "amiId", "is arm64"),
    ({}, {"gpu_image": Image("ami-1", "x86_64", "uefi-preferred", 300)}, "rootVolumeGib", "less than the image's 300"),
    ({}, {"head_image": Image("ami-1", "x86_64", "uefi", 500)}, "headVolumeGib", "less than the image's 500"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "facts", "key", "message"), ACCOUNT)
def test_account_faults(overrides, facts, key, message):
    found = errors_of(account_findings(overrides, **facts))
    assert any(f.key == key and message in f"{f.cause} {f.remedy}" for f in found), found


def test_what_cannot_be_read_is_said_and_does_not_stop():
    findings = account_findings({}, unread=("quota L-417A185B: AccessDenied",), quotas_vcpus={})
    assert errors_of(findings) == [] and "AccessDenied" in findings[0].cause


def test_without_credentials_only_that_is_said():
    (finding,) = account_findings({}, no_entry="Unable to locate credentials", unread=("zones: x",))
    assert finding.level == "error" and "aws sts get-caller-identity" in finding.remedy


def test_no_credentials_are_noticed_when_reading(monkeypatch, tmp_path):
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    assert "credentials" in read_account(parse(GOOD)).no_entry
    assert "nobody" in read_account(parse({**GOOD, "profile": "nobody"})).no_entry


def test_a_pinned_image_that_cannot_be_looked_at_only_warns():
    findings = account_findings({"amiId": "ami-0123456789abcdef0"}, gpu_image=None)
    assert [(finding.level, finding.key) for finding in findings] == [("warning", "amiId")]


def test_quota_need_counts_the_head_apart():
    need = vcpus_needed(parse({**GOOD, "capacity": "spot", "instanceType": "p5.48xlarge"}))
    assert need == {("L-1216C47A",): 2, ("L-C4BD4855", "L-7212CCBC"): 384}
    assert vcpus_needed(parse({**GOOD, **BLOCK})) == {("L-1216C47A",): 2}


def test_unknown_keys_and_types_are_findings():
    with pytest.raises(InfraError) as caught:
        parse({"nodeCnt": 2, "nodeCount": "many", "capacity": "cheap", "redisPassword": 12345})
    text = str(caught.value)
    assert "did you mean nodeCount?" in text and "many" in text and "capacity" in text
    assert "12345" not in text


def test_engine_strings_and_stack_file_give_the_same_configuration():
    stack = load_stack_file(INFRA / "Pulumi.prod.yaml")
    raw = yaml.safe_load((INFRA / "Pulumi.prod.yaml").read_text())["config"]
    strings = {key: value if isinstance(value, str) else json.dumps(value) for key, value in raw.items()}
    assert from_strings(strings) == stack


@pytest.mark.parametrize("stack", ["dev", "prod"])
def test_example_stacks_can_be_built(stack):
    assert errors_of(check_config(load_stack_file(INFRA / f"Pulumi.{stack}.yaml"), now=NOW)) == []


def test_project_file_holds_the_schema_of_the_model():
    text = (INFRA / "Pulumi.yaml").read_text()
    assert text == project_file(), "run: python -m infra.config > /tmp/p && mv /tmp/p infra/Pulumi.yaml"
    assert yaml.safe_load(text)["config"] == schema_block()
    assert set(schema_block()) | {"region", "profile", "redisPassword"} == set(camel_keys())


def test_secret_is_not_in_the_repr():
    assert "hunter2hunter2hunter2" not in repr(ClusterConfig(redis_password="hunter2hunter2hunter2"))


def test_check_command(capsys, tmp_path):
    assert check_main(["dev"]) == 0
    wrong = tmp_path / "Pulumi.x.yaml"
    wrong.write_text("config:\n  loopworks:allowedCidrs: ['0.0.0.0/0']\n")
    assert check_main([str(wrong), "--json"]) == 2
    assert "opens the port to the world" in capsys.readouterr().out
    assert check_main([str(tmp_path / "Pulumi.missing.yaml")]) == 2
    assert "no file" in capsys.readouterr().out
