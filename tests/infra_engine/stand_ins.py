"""Answers for AWS calls that moto does not implement, at the level of HTTP, so that boto3 still sends and checks them.

EC2: placement groups, capacity reservations and blocks, images with boot modes. SSM: AWS's public parameters.
Service Quotas: EC2 quotas. FSx: data repository associations. Each is as small as it can be.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from infra.account import GPU_PARAMETERS, UBUNTU_PARAMETERS

GPU_IMAGE, HEAD_IMAGE = "ami-0a1b2c3d4e5f60718", "ami-0f1e2d3c4b5a69788"
Answer = tuple[int, str, str]  # HTTP status, content type, body


@dataclass
class ImageEntry:
    """One image of the region."""

    architecture: str = "x86_64"
    boot_mode: str = "uefi-preferred"
    root_gib: int = 75


def _images() -> dict[str, ImageEntry]:
    return {GPU_IMAGE: ImageEntry(root_gib=75), HEAD_IMAGE: ImageEntry(root_gib=8)}


def _parameters() -> dict[str, str]:
    return {GPU_PARAMETERS[0]: GPU_IMAGE, UBUNTU_PARAMETERS[0]: HEAD_IMAGE}


def _quotas() -> dict[str, float]:
    codes = ("L-417A185B", "L-DB2E81BA", "L-1216C47A", "L-7212CCBC", "L-C4BD4855", "L-3819A6DF", "L-34B43A08")
    return dict.fromkeys(codes, 100_000.0)


@dataclass
class StandIns:
    """What the answers are made of; tests change it to play other accounts."""

    images: dict[str, ImageEntry] = field(default_factory=_images)
    parameters: dict[str, str] = field(default_factory=_parameters)
    quotas_vcpus: dict[str, float] = field(default_factory=_quotas)
    placement_groups: dict[str, str] = field(default_factory=dict)
    reservations: dict[str, dict[str, str]] = field(default_factory=dict)
    associations: dict[str, dict[str, Any]] = field(default_factory=dict)

    def answer(self, target: str, body: bytes) -> Answer | None:
        """The answer to one request, or None where moto should give it. `target` is the X-Amz-Target header."""
        operation = target.rpartition(".")[2]
        if operation in ("GetServiceQuota", "CreateDataRepositoryAssociation", "DeleteDataRepositoryAssociation"):
            return self._json(operation, json.loads(body))
        if operation == "GetParameters":
            return self._get_parameters(json.loads(body))
        form = {key: values[0] for key, values in parse_qs(body.decode("latin-1")).items()}
        maker = {
            "CreatePlacementGroup": self._create_group,
            "DeletePlacementGroup": self._delete_group,
            "CreateCapacityReservation": self._create_reservation,
            "ModifyCapacityReservation": self._modify_reservation,
            "CancelCapacityReservation": self._cancel_reservation,
            "PurchaseCapacityBlock": self._purchase_block,
            "DescribeImages": self._describe_images,
        }.get(form.get("Action", ""))
        return None if maker is None else maker(form)

    def _json(self, operation: str, request: dict[str, Any]) -> Answer:
        if operation == "GetServiceQuota":
            value = self.quotas_vcpus.get(request["QuotaCode"])
            if value is None:
                return _json_answer(400, {"__type": "NoSuchResourceException", "message": "no such quota"})
            return _json_answer(200, {"Quota": {"QuotaCode": request["QuotaCode"], "Value": value}})
        if operation == "DeleteDataRepositoryAssociation":
            self.associations.pop(request["AssociationId"])
            return _json_answer(200, {"AssociationId": request["AssociationId"], "Lifecycle": "DELETING"})
        association = {**request, "AssociationId": f"dra-{_hex(17)}", "Lifecycle": "AVAILABLE"}
        self.associations[association["AssociationId"]] = association
        association.pop("ClientRequestToken", None)
        return _json_answer(200, {"Association": association})

    def _get_parameters(self, request: dict[str, Any]) -> Answer | None:
        names = request["Names"]
        if not all(name.startswith("/aws/service/") for name in names):
            return None
        found = [{"Name": name, "Value": self.parameters[name]} for name in names if name in self.parameters]
        missing = [name for name in names if name not in self.parameters]
        return _json_answer(200, {"Parameters": found, "InvalidParameters": missing})

    def _create_group(self, form: dict[str, str]) -> Answer:
        name = form["GroupName"]
        if name in self.placement_groups:
            return _fault("InvalidPlacementGroup.Duplicate", f"{name} exists")
        group_id = f"pg-{_hex(17)}"
        self.placement_groups[name] = group_id
        fields = {"groupName": name, "strategy": form["Strategy"], "state": "available", "groupId": group_id}
        return _xml(form["Action"], f"<placementGroup>{_fields(fields)}</placementGroup>")

    def _delete_group(self, form: dict[str, str]) -> Answer:
        self.placement_groups.pop(form["GroupName"])
        return _xml(form["Action"], "<return>true</return>")

    def _create_reservation(self, form: dict[str, str]) -> Answer:
        fields = {
            "capacityReservationId": f"cr-{_hex(17)}",
            "instanceType": form["InstanceType"],
            "totalInstanceCount": form["InstanceCount"],
            "state": "active",
        }
        self.reservations[fields["capacityReservationId"]] = {**fields, "group": form.get("PlacementGroupArn", "")}
        return _xml(form["Action"], f"<capacityReservation>{_fields(fields)}</capacityReservation>")

    def _modify_reservation(self, form: dict[str, str]) -> Answer:
        self.reservations[form["CapacityReservationId"]]["totalInstanceCount"] = form["InstanceCount"]
        return _xml(form["Action"], "<return>true</return>")

    def _cancel_reservation(self, form: dict[str, str]) -> Answer:
        self.reservations.pop(form["CapacityReservationId"])
        return _xml(form["Action"], "<return>true</return>")

    def _purchase_block(self, form: dict[str, str]) -> Answer:
        fields = {"capacityReservationId": f"cr-{_hex(17)}", "state": "payment-pending"}
        self.reservations[fields["capacityReservationId"]] = {**fields, "offering": form["CapacityBlockOfferingId"]}
        return _xml(form["Action"], f"<capacityReservation>{_fields(fields)}</capacityReservation>")

    def _describe_images(self, form: dict[str, str]) -> Answer:
        wanted = [value for key, value in form.items() if key.startswith("ImageId.")]
        missing = [name for name in wanted if name not in self.images]
        if missing:
            return _fault("InvalidAMIID.NotFound", f"The image id '[{missing[0]}]' does not exist")
        return _xml(form["Action"], f"<imagesSet>{''.join(map(self._image, wanted))}</imagesSet>")

    def _image(self, image_id: str) -> str:
        image = self.images[image_id]
        disk = f"<item><deviceName>/dev/sda1</deviceName><ebs><volumeSize>{image.root_gib}</volumeSize></ebs></item>"
        fields = {
            "imageId": image_id,
            "imageState": "available",
            "architecture": image.architecture,
            "bootMode": image.boot_mode,
        }
        return f"<item>{_fields(fields)}<blockDeviceMapping>{disk}</blockDeviceMapping></item>"


def _hex(digits: int) -> str:
    return secrets.token_hex(digits)[:digits]


def _fields(values: dict[str, str]) -> str:
    return "".join(f"<{key}>{escape(value)}</{key}>" for key, value in values.items())


def _json_answer(status: int, document: dict[str, Any]) -> Answer:
    return status, "application/x-amz-json-1.1", json.dumps(document)


def _xml(action: str, inner: str) -> Answer:
    space = 'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"'
    return 200, "text/xml", f"<{action}Response {space}><requestId>test</requestId>{inner}</{action}Response>"


def _fault(code: str, message: str) -> Answer:
    detail = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
    return 400, "text/xml", f"<Response><Errors>{detail}</Errors><RequestID>test</RequestID></Response>"
