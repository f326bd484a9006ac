"""The chart's values: every key with type, default and reason. `write_values.py` makes the chart's files of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Quantity = Annotated[str, Field(pattern=r"^[1-9][0-9]*(Mi|Gi)$")]
AnyQuantity = Annotated[str, Field(pattern=r"^([0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?)?$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Objects = list[dict[str, Any]]
Texts = dict[str, str]


def _key(text: str, default: Any = ...) -> Any:
    return Field(default, description=text)


class Values(BaseModel):
    """A table of values; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Image(Values):
    """The container image of server and gateway."""

    repository: str = _key("where the image is", "vlm-relay")
    tag: str = _key("its tag; empty: the chart's appVersion", "")
    digest: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")] = _key("its digest, before the tag", "")
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = _key("when it is pulled", "IfNotPresent")
    pullSecrets: Objects = _key("secrets of the registry, [{name: ...}]", [])


class Gpu(Values):
    """The GPUs of each server pod; from these and the model the profile is made."""

    count: Count = _key("GPUs per server pod; 0: everything on the CPU", 0)
    memoryGib: Positive = _key("of each GPU; the KV cache gets what weights, embeddings and 12 % reserve leave", 80)
    resource: str = _key("the extended resource that is asked for", "nvidia.com/gpu")
    runtimeClassName: str = _key("runtime class of pods that use GPUs, such as nvidia", "")


class Claim(Values):
    """A volume with the checkpoint."""

    claimName: str = _key("an existing PersistentVolumeClaim, mounted read-only", "")


class Hub(Values):
    """A checkpoint fetched by an init container."""

    repo: str = _key("repository on the hub, such as llava-hf/llava-1.5-7b-hf", "")
    revision: str = _key("commit or tag; give a commit, or restarts may load another model", "main")
    existingSecret: str = _key("secret with the hub's token, if the repository needs one", "")
    secretKey: str = _key("the token's key in that secret", "token")
    endpoint: str = _key("address of a mirror (HF_ENDPOINT); empty: the hub itself", "")


class ImageVolume(Values):
    """An OCI image with the checkpoint, mounted as a volume (Kubernetes 1.33 or newer)."""

    reference: str = _key("the image", "")
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = _key("when it is pulled", "IfNotPresent")


class Model(Values):
    """The checkpoint, a LLaVA-1.5 folder in Hugging Face format."""

    source: Literal["container", "claim", "hub", "image"] = _key(
        "container: a path in the server's own image (the demo checkpoint); claim; hub; image: an OCI image volume",
        "container",
    )
    path: str = _key("the folder: in the container, or below the root of the volume", "demo/checkpoint")
    claim: Claim = Claim()
    hub: Hub = Hub()
    image: ImageVolume = ImageVolume()
    encoderWeightsMib: Count = _key("GPU memory of one encoder; LLaVA-1.5-7B in float16", 620)
    decoderWeightsMib: Count = _key("GPU memory of one decoder; LLaVA-1.5-7B in float16", 12600)


class Cache(Values):
    """Where what is built from the checkpoint (ONNX graph, TensorRT engine) is kept."""

    type: Literal["emptyDir", "claim", "hostPath"] = _key(
        "emptyDir: built at each start; claim: shared (ReadWriteMany for several pods); hostPath: per node",
        "emptyDir",
    )
    size: AnyQuantity = _key("limit of the emptyDir, or size of the claim that is made", "4Gi")
    existingClaim: str = _key("a claim that is there; empty: one is made", "")
    storageClassName: str = _key("class of the claim that is made; empty: the cluster's default", "")
    accessModes: list[Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]] = _key(
        "of the claim that is made", ["ReadWriteMany"]
    )
    hostPath: str = _key("folder on the node, writable for podSecurityContext.fsGroup", "")


class Redis(Values):
    """The embedding cache that servers share, optional."""

    existingSecret: str = _key("secret with the URL of the Redis; empty: no shared cache", "")
    secretKey: str = _key("the URL's key in that secret", "url")


class Probes(Values):
    """How soon a pod is taken out, and how long it may try to heal; all are functional: a question is asked."""

    startupSeconds: Positive = _key("loading, exporting and downloading may take this long", 1800)
    readinessPeriodSeconds: Positive = _key("two failures in a row take the pod out of its services", 3)
    livenessSeconds: Positive = _key("failing for this long restarts the container; reloading a model is shorter", 180)
    timeoutSeconds: Positive = _key("for one answer", 10)


class Autoscaling(Values):
    """Replicas by load. The gauges are per pod, on Triton's /metrics."""

    type: Literal["none", "hpa", "keda"] = _key("hpa needs an adapter that serves the gauges as pod metrics", "none")
    minReplicas: Positive = _key("never fewer", 1)
    maxReplicas: Positive = _key("never more", 4)
    inFlight: Count = _key("requests in flight per pod; 0: 80 % of what its decoders batch", 0)
    waiting: Positive = _key("requests waiting per pod", 4)
    prometheusAddress: str = _key("for keda: where Prometheus is", "")
    scaleDownSeconds: Count = _key("the load must be low for this long; loading a model takes minutes", 600)


class Disruption(Values):
    """The PodDisruptionBudget. It counts unavailable pods, so it agrees with any number of replicas."""

    enabled: bool = _key("whether there is one", True)
    maxUnavailable: Positive = _key("pods that may be evicted at a time", 1)


class Placed(Values):
    """What both deployments have."""

    podAnnotations: Texts = _key("on the pods", {})
    podLabels: Texts = _key("on the pods", {})
    nodeSelector: Texts = _key("labels of the nodes", {})
    tolerations: Objects = _key("of taints, such as those of GPU nodes", [])
    affinity: dict[str, Any] = _key("of the pods", {})
    topologySpread: bool = _key("spread the pods over nodes and zones where possible", True)
    priorityClassName: str = _key("of the pods", "")
    podDisruptionBudget: Disruption = Disruption()
    extraArgs: list[str] = _key("more arguments of the command", [])
    extraEnv: Objects = _key("more environment variables", [])
    extraEnvFrom: Objects = _key("ConfigMaps and Secrets as environment", [])
    extraVolumes: Objects = _key("more volumes", [])
    extraVolumeMounts: Objects = _key("more mounts", [])
    extraInitContainers: Objects = _key("more init containers, before ours", [])
    extraContainers: Objects = _key("more containers", [])


class Server(Placed):
    """The pods with tritonserver."""

    replicas: Count = _key("pods; not used with autoscaling", 1)
    cpu: AnyQuantity = _key("requested per pod", "2")
    cpuLimit: AnyQuantity = _key("limit; empty: none, throttled decoders stall everybody", "")
    memory: Quantity = _key("for the processes; request and limit are this and the shared memory together", "6Gi")
    sharedMemoryReserve: Quantity = _key("in /dev/shm beside the embeddings: Triton's own regions", "256Mi")
    leaveSeconds: Positive = _key("a stopping pod goes on serving for this long, until its address is forgotten", 5)
    longestGenerationSeconds: Positive = _key(
        "what runs may take this long to finish; with it go the drain's limit and the grace period", 120
    )
    maxSurge: Count = _key("extra pods in a rollout; 0: no spare GPU is needed", 0)
    maxUnavailable: Count = _key("pods missing in a rollout", 1)
    probes: Probes = Probes()
    autoscaling: Autoscaling = Autoscaling()


class GatewayAutoscaling(Values):
    """Replicas of the gateway by CPU."""

    enabled: bool = _key("whether there is a HorizontalPodAutoscaler", False)
    minReplicas: Positive = _key("never fewer", 2)
    maxReplicas: Positive = _key("never more", 8)
    cpuPercent: Positive = _key("of the requested CPU", 70)


class Gateway(Placed):
    """The OpenAI-compatible gateway."""

    enabled: bool = _key("whether there is one", True)
    placement: Literal["separate", "beside"] = _key(
        "separate: a deployment of its own, each gateway balances over all servers; "
        "beside: a container in every server pod, for routers that choose the pod",
        "separate",
    )
    replicas: Count = _key("pods; not used with autoscaling or beside the server", 2)
    cpu: AnyQuantity = _key("requested", "500m")
    cpuLimit: AnyQuantity = _key("limit; empty: none", "")
    memory: Quantity = _key("request and limit", "512Mi")
    apiKeysSecret: str = _key("secret with the clients' keys, separated by commas; empty: no key is asked for", "")
    apiKeysSecretKey: str = _key("their key in that secret", "keys")
    maxInFlight: Positive = _key("requests per gateway; more get a 429", 256)
    deadlineSeconds: Positive = _key("for a request that sets none", 300)
    autoscaling: GatewayAutoscaling = GatewayAutoscaling()


class Service(Values):
    """The service in front of the gateway."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = _key("of the service", "ClusterIP")
    port: Port = _key("where it listens", 80)
    annotations: Texts = _key("on the service", {})


class Ingress(Values):
    """An Ingress to the gateway."""

    enabled: bool = _key("whether there is one", False)
    className: str = _key("the controller's class", "")
    annotations: Texts = _key("the body limit and the read timeout of your controller belong here", {})
    host: str = _key("host name", "")
    tlsSecret: str = _key("secret with its certificate; empty: no TLS", "")


class NetworkPolicy(Values):
    """Who may talk to the pods. The health port is for the node's own probes only."""

    enabled: bool = _key("whether there is one", True)
    clients: Objects = _key("peers that may use the gateway; empty: all", [])
    grpcClients: Objects = _key("peers beside the gateway that may use the server's gRPC and HTTP ports", [])
    monitoring: Objects = _key("peers that may read metrics; empty: all pods of all namespaces", [])
    egress: Objects = _key(
        "more rules, e.g. for Redis or image hosts; DNS, the server and the traces' collector are allowed", []
    )


class Metrics(Values):
    """What the Prometheus operator and Grafana pick up."""

    podMonitor: bool = _key("a PodMonitor for servers and gateways", False)
    rules: bool = _key("a PrometheusRule with the alerts", False)
    dashboard: bool = _key("a ConfigMap with the Grafana dashboard", False)
    intervalSeconds: Positive = _key("between two scrapes", 15)
    labels: Texts = _key("on all three, for the operator's selectors", {})


class Tracing(Values):
    """OpenTelemetry spans from the gateway to the decoder."""

    endpoint: str = _key("OTLP/HTTP collector, such as http://collector:4318; empty: no traces", "")
    ratio: Annotated[float, Field(ge=0, le=1)] = _key("share of requests without a traceparent that are traced", 0.01)


class Account(Values):
    """The service account; its token is not mounted."""

    create: bool = _key("whether one is made", True)
    name: str = _key("its name; empty: the release's", "")
    annotations: Texts = _key("on it", {})


class Chart(Values):
    """All values."""

    nameOverride: str = _key("instead of the chart's name", "")
    fullnameOverride: Annotated[str, Field(pattern=r"^([a-z]([-a-z0-9]{0,38}[a-z0-9])?)?$")] = _key(
        "instead of release and chart name", ""
    )
    commonLabels: Texts = _key("on everything", {})
    image: Image = Image()
    gpu: Gpu = Gpu()
    model: Model = Model()
    profile: dict[str, Any] = _key(
        "keys of the deployment profile over those made from gpu and model, e.g. {decode: {max_sequences: 64}}", {}
    )
    profileFiles: Texts = _key("files beside the profile, by name, such as a recorded topology", {})
    cache: Cache = Cache()
    redis: Redis = Redis()
    server: Server = Server()
    gateway: Gateway = Gateway()
    service: Service = Service()
    ingress: Ingress = Ingress()
    networkPolicy: NetworkPolicy = NetworkPolicy()
    metrics: Metrics = Metrics()
    tracing: Tracing = Tracing()
    serviceAccount: Account = Account()
    podSecurityContext: dict[str, Any] = _key(
        "of all pods; on OpenShift set runAsUser and fsGroup to null",
        {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    )
    containerSecurityContext: dict[str, Any] = _key(
        "of all containers",
        {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    )
    extraObjects: Objects = _key("more manifests; templates in them are expanded", [])
