{{- define "topoproxyAgent.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" | trimSuffix "-agent" }}-agent
{{- end }}

{{- define "topoproxyAgent.labels" -}}
app.kubernetes.io/name: topoproxy-agent
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "topoproxyAgent.selector" -}}
app.kubernetes.io/name: topoproxy-agent
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "topoproxyAgent.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}
