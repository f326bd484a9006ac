{{/* What the pods of both deployments have in common; `component` is server or gateway, `placed` its values. */}}
{{- define "vlm-relay.podCommon" -}}
{{- $root := .root -}}
serviceAccountName: {{ include "vlm-relay.serviceAccountName" $root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with .placed.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .placed.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placed.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placed.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .placed.topologySpread }}
topologySpreadConstraints:
  {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "vlm-relay.selector" $root | nindent 8 }}
        app.kubernetes.io/component: {{ $.component }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "vlm-relay.podMetadata" -}}
{{- $root := .root -}}
labels:
  {{- include "vlm-relay.labels" $root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- with .placed.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
