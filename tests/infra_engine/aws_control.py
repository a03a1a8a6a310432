"""IAM, KMS, SNS, CloudWatch, EventBridge, budgets, parameters."""

from __future__ import annotations

from typing import Any

from tests.infra_engine.cloud import Cloud
from tests.infra_engine.provider import Created, Handler, Inputs, api, tag_list


def _role(cloud: Cloud, inputs: Inputs) -> Created:
    answer = cloud.client("iam").create_role(
        RoleName=inputs["name"], AssumeRolePolicyDocument=inputs["assumeRolePolicy"], Tags=tag_list(inputs)
    )
    return inputs["name"], {"arn": answer["Role"]["Arn"]}


def _delete_role(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("iam").delete_role(RoleName=id_)


def _role_policy(cloud: Cloud, inputs: Inputs) -> Created:
    cloud.client("iam").put_role_policy(
        RoleName=inputs["role"], PolicyName=inputs["name"], PolicyDocument=inputs["policy"]
    )
    return f"{inputs['role']}:{inputs['name']}", {}


def _delete_role_policy(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("iam").delete_role_policy(RoleName=inputs["role"], PolicyName=inputs["name"])


def _attach(cloud: Cloud, inputs: Inputs) -> Created:
    # moto has no managed policies of AWS by default; one of this name stands in for it.
    iam = cloud.client("iam")
    name = inputs["policyArn"].rpartition("/")[2]
    arn = f"arn:aws:iam::{cloud.account}:policy/{name}"
    known = {policy["Arn"] for policy in iam.list_policies(Scope="Local")["Policies"]}
    if arn not in known:
        document = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"ssm:*","Resource":"*"}]}'
        iam.create_policy(PolicyName=name, PolicyDocument=document)
    iam.attach_role_policy(RoleName=inputs["role"], PolicyArn=arn)
    return f"{inputs['role']}/{name}", {"standInArn": arn}


def _detach(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("iam").detach_role_policy(RoleName=inputs["role"], PolicyArn=outputs["standInArn"])


def _profile(cloud: Cloud, inputs: Inputs) -> Created:
    iam = cloud.client("iam")
    answer = iam.create_instance_profile(InstanceProfileName=inputs["name"], Tags=tag_list(inputs))
    iam.add_role_to_instance_profile(InstanceProfileName=inputs["name"], RoleName=inputs["role"])
    return inputs["name"], {"arn": answer["InstanceProfile"]["Arn"]}


def _delete_profile(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    iam = cloud.client("iam")
    iam.remove_role_from_instance_profile(InstanceProfileName=id_, RoleName=inputs["role"])
    iam.delete_instance_profile(InstanceProfileName=id_)


def _log_group(cloud: Cloud, inputs: Inputs) -> Created:
    logs = cloud.client("logs")
    logs.create_log_group(logGroupName=inputs["name"], tags=inputs["tags"])
    logs.put_retention_policy(logGroupName=inputs["name"], retentionInDays=inputs["retentionInDays"])
    return inputs["name"], {"arn": f"arn:aws:logs:us-east-1:{cloud.account}:log-group:{inputs['name']}"}


def _delete_log_group(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("logs").delete_log_group(logGroupName=id_)


def _key(cloud: Cloud, inputs: Inputs) -> Created:
    kms = cloud.client("kms")
    tags = [{"TagKey": tag["Key"], "TagValue": tag["Value"]} for tag in tag_list(inputs)]
    answer = kms.create_key(Description=inputs["description"], Policy=inputs["policy"], Tags=tags)["KeyMetadata"]
    if inputs["enableKeyRotation"]:
        kms.enable_key_rotation(KeyId=answer["KeyId"])
    return answer["KeyId"], {"arn": answer["Arn"], "keyId": answer["KeyId"]}


def _delete_key(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("kms").schedule_key_deletion(KeyId=id_, PendingWindowInDays=inputs["deletionWindowInDays"])


def _topic(cloud: Cloud, inputs: Inputs) -> Created:
    arn = cloud.client("sns").create_topic(
        Name=inputs["name"], Attributes={"KmsMasterKeyId": inputs["kmsMasterKeyId"]}, Tags=tag_list(inputs)
    )["TopicArn"]
    return arn, {"arn": arn}


def _delete_topic(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("sns").delete_topic(TopicArn=id_)


def _topic_policy(cloud: Cloud, inputs: Inputs) -> Created:
    cloud.client("sns").set_topic_attributes(
        TopicArn=inputs["arn"], AttributeName="Policy", AttributeValue=inputs["policy"]
    )
    return inputs["arn"], {}


def _subscription(cloud: Cloud, inputs: Inputs) -> Created:
    answer = cloud.client("sns").subscribe(
        TopicArn=inputs["topic"], Protocol=inputs["protocol"], Endpoint=inputs["endpoint"], ReturnSubscriptionArn=True
    )
    return answer["SubscriptionArn"], {}


def _unsubscribe(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("sns").unsubscribe(SubscriptionArn=id_)


def _alarm(cloud: Cloud, inputs: Inputs) -> Created:
    names = {"name": "AlarmName", "alarmActions": "AlarmActions", "alarmDescription": "AlarmDescription"}
    plain = (
        "comparisonOperator",
        "namespace",
        "metricName",
        "statistic",
        "period",
        "evaluationPeriods",
        "treatMissingData",
    )
    arguments = {name: inputs[key] for key, name in names.items()}
    arguments |= {key[0].upper() + key[1:]: inputs[key] for key in plain}
    arguments["Threshold"] = float(inputs["threshold"])
    arguments["Dimensions"] = [{"Name": key, "Value": value} for key, value in inputs["dimensions"].items()]
    cloud.client("cloudwatch").put_metric_alarm(**arguments, Tags=tag_list(inputs))
    return inputs["name"], {}


def _delete_alarm(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("cloudwatch").delete_alarms(AlarmNames=[id_])


def _rule(cloud: Cloud, inputs: Inputs) -> Created:
    answer = cloud.client("events").put_rule(
        Name=inputs["name"],
        Description=inputs["description"],
        EventPattern=inputs["eventPattern"],
        Tags=tag_list(inputs),
    )
    return inputs["name"], {"arn": answer["RuleArn"]}


def _delete_rule(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("events").delete_rule(Name=id_)


def _target(cloud: Cloud, inputs: Inputs) -> Created:
    target = {"Id": "alerts", "Arn": inputs["arn"]}
    cloud.client("events").put_targets(Rule=inputs["rule"], Targets=[target])
    return f"{inputs['rule']}-alerts", {}


def _delete_target(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("events").remove_targets(Rule=inputs["rule"], Ids=["alerts"])


def _budget(cloud: Cloud, inputs: Inputs) -> Created:
    filters = {entry["name"]: entry["values"] for entry in inputs["costFilters"]}
    notifications = [_notification(entry) for entry in inputs["notifications"]]
    cloud.client("budgets").create_budget(
        AccountId=cloud.account,
        Budget={
            "BudgetName": inputs["name"],
            "BudgetType": inputs["budgetType"],
            "TimeUnit": inputs["timeUnit"],
            "BudgetLimit": {"Amount": inputs["limitAmount"], "Unit": inputs["limitUnit"]},
            "CostFilters": filters,
        },
        NotificationsWithSubscribers=notifications,
    )
    return f"{cloud.account}:{inputs['name']}", {}


def _notification(entry: dict[str, Any]) -> dict[str, Any]:
    keys = ("comparisonOperator", "notificationType", "thresholdType")
    notification = {**api({key: entry[key] for key in keys}), "Threshold": float(entry["threshold"])}
    subscribers = [{"SubscriptionType": "SNS", "Address": arn} for arn in entry["subscriberSnsTopicArns"]]
    return {"Notification": notification, "Subscribers": subscribers}


def _delete_budget(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("budgets").delete_budget(AccountId=cloud.account, BudgetName=inputs["name"])


def _parameter(cloud: Cloud, inputs: Inputs) -> Created:
    cloud.client("ssm").put_parameter(
        Name=inputs["name"],
        Description=inputs["description"],
        Type=inputs["type"],
        Value=inputs["value"],
        Overwrite=True,
    )
    return inputs["name"], {"arn": f"arn:aws:ssm:us-east-1:{cloud.account}:parameter{inputs['name']}"}


def _delete_parameter(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("ssm").delete_parameter(Name=id_)


HANDLERS = {
    "aws:iam/role:Role": Handler(_role, _delete_role, name_property="name"),
    "aws:iam/rolePolicy:RolePolicy": Handler(_role_policy, _delete_role_policy, put_again=True, name_property="name"),
    "aws:iam/rolePolicyAttachment:RolePolicyAttachment": Handler(_attach, _detach),
    "aws:iam/instanceProfile:InstanceProfile": Handler(_profile, _delete_profile, name_property="name"),
    "aws:cloudwatch/logGroup:LogGroup": Handler(_log_group, _delete_log_group, name_property="name"),
    "aws:kms/key:Key": Handler(_key, _delete_key),
    "aws:sns/topic:Topic": Handler(_topic, _delete_topic, name_property="name"),
    "aws:sns/topicPolicy:TopicPolicy": Handler(_topic_policy, put_again=True),
    "aws:sns/topicSubscription:TopicSubscription": Handler(_subscription, _unsubscribe),
    "aws:cloudwatch/metricAlarm:MetricAlarm": Handler(_alarm, _delete_alarm, put_again=True, name_property="name"),
    "aws:cloudwatch/eventRule:EventRule": Handler(_rule, _delete_rule, put_again=True, name_property="name"),
    "aws:cloudwatch/eventTarget:EventTarget": Handler(_target, _delete_target, put_again=True),
    "aws:budgets/budget:Budget": Handler(_budget, _delete_budget, name_property="name"),
    "aws:ssm/parameter:Parameter": Handler(_parameter, _delete_parameter, put_again=True),
}
