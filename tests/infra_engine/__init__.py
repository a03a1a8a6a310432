"""A test engine for the Pulumi program: the SDK's own gRPC interfaces in front, a moto server behind.

    engine.py     ResourceMonitor and Engine over gRPC; preview, up, destroy
    state.py      what a stack remembers; create, same, update, replace, delete
    wire.py       secrets, unknowns and numbers of the wire format
    provider.py   resource types to AWS calls through boto3 (so botocore checks every parameter)
    cloud.py      the moto server, with stand-ins for calls that moto lacks, and launch rules that it does not check
    demo.py       `python -m tests.infra_engine.demo`: plan, up, outputs, inventory, cost, destroy

What a green run proves: the program runs as `pulumi up` runs it; every resource, dependency and option that it
registers; every AWS call has valid parameters; layouts obey EC2's limits; secrets stay marked; plans change what they
should. What only a real `pulumi up` proves: the AWS provider's own schema and diff, permissions, capacity, quotas,
images, and that AWS accepts the calls.
"""
