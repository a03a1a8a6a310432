"""Who may come in: networks, keys, alerts."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re

from infra.config import ClusterConfig
from infra.findings import Finding, error, warning

WIDEST_PREFIX = 8
KEY_TYPES = ("ssh-ed25519", "ssh-rsa")  # what ImportKeyPair takes
MIN_REDIS_PASSWORD = 16


def check(config: ClusterConfig) -> list[Finding]:
    """Findings about access to the cluster."""
    findings: list[Finding] = []
    for key, networks in (("allowedCidrs", config.allowed_cidrs), ("redisCidrs", config.redis_cidrs)):
        for text in networks:
            findings += _network(key, text)
    findings += _keys(config) + _ways_in(config) + _redis(config)
    for address in config.alert_emails:
        if not re.fullmatch(r"[^@\s]+@[^@\s]+\.[^@\s]+", address):
            findings.append(error("alertEmails", f"{address!r} is not a mail address", "write it like ops@example.org"))
    if config.monthly_budget_usd and not config.alert_emails:
        findings.append(error("alertEmails", "a budget that tells nobody has no use", "name at least one address"))
    if not config.monthly_budget_usd:
        findings.append(
            warning("monthlyBudgetUsd", "no budget is set", "set a sum, so that forgotten nodes are noticed")
        )
    if config.kms_key_arn and not re.fullmatch(r"arn:aws[a-z-]*:kms:[a-z0-9-]+:\d{12}:key/[\w-]+", config.kms_key_arn):
        findings.append(
            error("kmsKeyArn", f"{config.kms_key_arn!r} is not the ARN of a key", "use arn:aws:kms:...:key/ID")
        )
    return findings


def _network(key: str, text: str) -> list[Finding]:
    try:
        network = ipaddress.ip_network(text)
    except ValueError as fault:
        return [error(key, f"{text!r} is not a network ({fault})", "write it like 203.0.113.0/24")]
    if network.version == 6:
        return [error(key, f"{text} is IPv6, the VPC is IPv4 only", "name the IPv4 network of the office or VPN")]
    if network.prefixlen == 0:
        return [error(key, f"{text} opens the port to the world", "name the network of the office or VPN, or use ssm")]
    if network.prefixlen < WIDEST_PREFIX:
        return [error(key, f"{text} is wider than /{WIDEST_PREFIX}", "name the network of the office or VPN")]
    return []


def _keys(config: ClusterConfig) -> list[Finding]:
    text = config.ssh_public_key.strip()
    if "PRIVATE KEY" in text:
        return [
            error("sshPublicKey", "this is a private key", "use the .pub file, and make a new pair: this one leaked")
        ]
    findings: list[Finding] = []
    if text and config.key_name:
        findings.append(error("keyName", "keyName and sshPublicKey exclude each other", "keep one of them"))
    if text and not _is_public_key(text):
        findings.append(
            error("sshPublicKey", "not an OpenSSH public key that EC2 takes", f"use {' or '.join(KEY_TYPES)}")
        )
    return findings


def _is_public_key(text: str) -> bool:
    parts = text.split()
    if len(parts) < 2 or parts[0] not in KEY_TYPES:
        return False
    try:
        blob = base64.b64decode(parts[1], validate=True)
    except binascii.Error:
        return False
    return blob[4 : 4 + len(parts[0])] == parts[0].encode()


def _ways_in(config: ClusterConfig) -> list[Finding]:
    has_key = bool(config.ssh_public_key or config.key_name)
    findings: list[Finding] = []
    if not has_key and not config.ssm:
        findings.append(
            error("sshPublicKey", "no key and no Session Manager: nobody gets in", "set a key or ssm: true")
        )
    if not config.head_public_ip and not config.ssm:
        findings.append(
            error("headPublicIp", "no public address and no Session Manager", "set headPublicIp or ssm: true")
        )
    if not config.head_public_ip and config.ssm and not has_key:
        findings.append(
            warning("sshPublicKey", "Ansible needs a key even through Session Manager", "set sshPublicKey or keyName")
        )
    if config.head_public_ip and not config.allowed_cidrs:
        findings.append(
            warning(
                "allowedCidrs", "the head has an address that nobody may reach", "name your network, or use ssm only"
            )
        )
    if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}", config.ssh_user):
        findings.append(error("sshUser", f"{config.ssh_user!r} is not a user name", "Ubuntu images use ubuntu"))
    return findings


def _redis(config: ClusterConfig) -> list[Finding]:
    if not config.redis_password:
        return []
    if len(config.redis_password) < MIN_REDIS_PASSWORD:
        return [
            error(
                "redisPassword",
                f"shorter than {MIN_REDIS_PASSWORD} characters",
                "pulumi config set --secret redisPassword $(openssl rand -hex 24)",
            )
        ]
    return []
