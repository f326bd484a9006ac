{{/* Environment of every container of ours. The home is writable for any user id: caches go there. */}}
{{- define "vlm-relay.env" -}}
- {name: HOME, value: /tmp}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- with .Values.tracing.endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
- {name: OTEL_TRACES_SAMPLER, value: parentbased_traceidratio}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ $.Values.tracing.ratio | quote }}}
{{- end }}
{{- end -}}

{{/* The gateway's container; `url` and `metricsUrl` say where the server is. */}}
{{- define "vlm-relay.gatewayContainer" -}}
{{- $root := .root -}}
{{- $gateway := $root.Values.gateway -}}
- name: gateway
  image: {{ include "vlm-relay.image" $root | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command:
    - vlm-relay
    - gateway
    - --host=0.0.0.0
    - --port=9000
    - --url={{ .url }}
    {{- with .metricsUrl }}
    - --metrics-url={{ . }}
    {{- end }}
    - --max-in-flight={{ $gateway.maxInFlight }}
    - --deadline-s={{ $gateway.deadlineSeconds }}
    - --drain-s={{ include "vlm-relay.drainSeconds" $root }}
    {{- range $gateway.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  env:
    {{- include "vlm-relay.env" $root | nindent 4 }}
    {{- with $gateway.apiKeysSecret }}
    - name: VLM_RELAY_API_KEYS
      valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $gateway.apiKeysSecretKey }}}}
    {{- end }}
    {{- with $gateway.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $gateway.extraEnvFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - {name: openai, containerPort: 9000}
  startupProbe:
    httpGet: {path: /health/live, port: openai}
    periodSeconds: 2
    failureThreshold: 60
  {{- if .probesServer }}
  # Functional: the server is asked a question, at most every 5 s. A busy server is a working one.
  readinessProbe:
    httpGet: {path: /health, port: openai}
    periodSeconds: {{ $root.Values.server.probes.readinessPeriodSeconds }}
    timeoutSeconds: {{ $root.Values.server.probes.timeoutSeconds }}
    failureThreshold: 2
  {{- else }}
  # The server's own readiness is asked in the container beside.
  readinessProbe:
    httpGet: {path: /health/live, port: openai}
    periodSeconds: {{ $root.Values.server.probes.readinessPeriodSeconds }}
    failureThreshold: 2
  {{- end }}
  livenessProbe:
    httpGet: {path: /health/live, port: openai}
    periodSeconds: 10
    timeoutSeconds: {{ $root.Values.server.probes.timeoutSeconds }}
    failureThreshold: 6
  lifecycle:
    preStop:
      # Goes on answering until nobody sends any more; SIGTERM then lets running answers finish.
      exec: {command: ["sleep", {{ $root.Values.server.leaveSeconds | quote }}]}
  resources:
    requests: {cpu: {{ $gateway.cpu | quote }}, memory: {{ $gateway.memory | quote }}}
    limits:
      memory: {{ $gateway.memory | quote }}
      {{- with $gateway.cpuLimit }}
      cpu: {{ . | quote }}
      {{- end }}
  securityContext:
    {{- toYaml $root.Values.containerSecurityContext | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    {{- with $gateway.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Mounts of all containers that see the profile, the checkpoint and the build cache. */}}
{{- define "vlm-relay.serverMounts" -}}
- {name: profile, mountPath: /etc/vlm-relay, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/vlm-relay}
{{- if ne .Values.model.source "container" }}
- {name: model, mountPath: /models{{ if ne .Values.model.source "hub" }}, readOnly: true{{ end }}}
{{- end }}
{{- with .Values.server.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The server's resources, `memoryMib` in all; the GPUs are the same in requests and limits. */}}
{{- define "vlm-relay.serverResources" -}}
{{- $values := .root.Values -}}
requests:
  cpu: {{ $values.server.cpu | quote }}
  memory: {{ printf "%vMi" .memoryMib | quote }}
  {{- if gt (int $values.gpu.count) 0 }}
  {{ $values.gpu.resource }}: {{ $values.gpu.count | quote }}
  {{- end }}
limits:
  {{- with $values.server.cpuLimit }}
  cpu: {{ . | quote }}
  {{- end }}
  memory: {{ printf "%vMi" .memoryMib | quote }}
  {{- if gt (int $values.gpu.count) 0 }}
  {{ $values.gpu.resource }}: {{ $values.gpu.count | quote }}
  {{- end }}
{{- end -}}

{{/* Fetches the checkpoint, then builds what is built from it, unless it is there already. */}}
{{- define "vlm-relay.serverInit" -}}
{{- $values := .Values -}}
{{- with $values.server.extraInitContainers }}
{{ toYaml . }}
{{- end }}
{{- if eq $values.model.source "hub" }}
- name: fetch
  image: {{ include "vlm-relay.image" . | quote }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  command:
    - hf
    - download
    - {{ $values.model.hub.repo | quote }}
    - --revision={{ $values.model.hub.revision }}
    - --local-dir={{ include "vlm-relay.checkpoint" . }}
  env:
    - {name: HOME, value: /tmp}
    - {name: HF_HOME, value: /tmp/huggingface}
    {{- with $values.model.hub.endpoint }}
    - {name: HF_ENDPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- with $values.model.hub.existingSecret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $values.model.hub.secretKey }}}}
    {{- end }}
    {{- with $values.server.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    requests: {cpu: 500m, memory: 1Gi}
    limits: {memory: 4Gi}
  securityContext:
    {{- toYaml $values.containerSecurityContext | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: model, mountPath: /models}
{{- end }}
- name: build
  image: {{ include "vlm-relay.image" . | quote }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  command: [vlm-relay, build, --profile=/etc/vlm-relay/profile.toml]
  env:
    {{- include "vlm-relay.env" . | nindent 4 }}
    {{- with $values.server.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- include "vlm-relay.serverResources" (dict "root" . "memoryMib" (include "vlm-relay.mib" $values.server.memory)) | nindent 4 }}
  securityContext:
    {{- toYaml $values.containerSecurityContext | nindent 4 }}
  volumeMounts:
    {{- include "vlm-relay.serverMounts" . | nindent 4 }}
{{- end -}}

{{- define "vlm-relay.serverContainer" -}}
{{- $values := .Values -}}
{{- $probes := $values.server.probes -}}
- name: server
  image: {{ include "vlm-relay.image" . | quote }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  command:
    - vlm-relay
    - serve
    - --profile=/etc/vlm-relay/profile.toml
    - --host=0.0.0.0
    - --health-port=8003
    {{- range $values.server.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  env:
    {{- include "vlm-relay.env" . | nindent 4 }}
    {{- with $values.redis.existingSecret }}
    - name: VLM_RELAY_REDIS_URL
      valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $values.redis.secretKey }}}}
    {{- end }}
    {{- with $values.server.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.server.extraEnvFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - {name: http, containerPort: 8000}
    - {name: grpc, containerPort: 8001}
    - {name: metrics, containerPort: 8002}
    - {name: health, containerPort: 8003}
  startupProbe:
    httpGet: {path: /health/ready, port: health}
    periodSeconds: 5
    timeoutSeconds: {{ $probes.timeoutSeconds }}
    failureThreshold: {{ max 1 (div (int $probes.startupSeconds) 5) }}
  # Red while no encoder or no decoder lives, a question finds no answer, or the pod drains.
  readinessProbe:
    httpGet: {path: /health/ready, port: health}
    periodSeconds: {{ $probes.readinessPeriodSeconds }}
    timeoutSeconds: {{ $probes.timeoutSeconds }}
    failureThreshold: 2
  # The same, but green while draining; models that died are reloaded meanwhile, so it has patience.
  livenessProbe:
    httpGet: {path: /health/live, port: health}
    periodSeconds: 10
    timeoutSeconds: {{ $probes.timeoutSeconds }}
    failureThreshold: {{ max 2 (div (int $probes.livenessSeconds) 10) }}
  lifecycle:
    preStop:
      # Not ready at once, still serving for a while, then refusing with a retry hint; returns when all is answered.
      httpGet: {path: "/drain?after_s={{ $values.server.leaveSeconds }}", port: health}
  resources:
    {{- include "vlm-relay.serverResources" (dict "root" . "memoryMib" (include "vlm-relay.serverMemoryMib" .)) | nindent 4 }}
  securityContext:
    {{- toYaml $values.containerSecurityContext | nindent 4 }}
  volumeMounts:
    - {name: shm, mountPath: /dev/shm}
    {{- include "vlm-relay.serverMounts" . | nindent 4 }}
{{- end -}}
