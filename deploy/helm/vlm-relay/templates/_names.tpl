{{- define "vlm-relay.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40 characters, so that the longest suffix still makes a DNS label of 63. */}}
{{- define "vlm-relay.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "vlm-relay.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "vlm-relay.selector" -}}
app.kubernetes.io/name: {{ include "vlm-relay.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "vlm-relay.labels" -}}
{{ include "vlm-relay.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "vlm-relay.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository ($image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "vlm-relay.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "vlm-relay.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* Name of the claim with the build cache. */}}
{{- define "vlm-relay.cacheClaim" -}}
{{- .Values.cache.existingClaim | default (printf "%s-cache" (include "vlm-relay.fullname" .)) -}}
{{- end -}}

{{- define "vlm-relay.gatewayIsSeparate" -}}
{{- if and .Values.gateway.enabled (eq .Values.gateway.placement "separate") -}}yes{{- end -}}
{{- end -}}

{{- define "vlm-relay.gatewayIsBeside" -}}
{{- if and .Values.gateway.enabled (eq .Values.gateway.placement "beside") -}}yes{{- end -}}
{{- end -}}

{{/* The component whose pods answer OpenAI clients. */}}
{{- define "vlm-relay.doorComponent" -}}
{{- if include "vlm-relay.gatewayIsBeside" . -}}server{{- else -}}gateway{{- end -}}
{{- end -}}
