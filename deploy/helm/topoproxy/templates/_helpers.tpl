{{- define "topoproxy.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}-node
{{- end }}

{{- define "topoproxy.labels" -}}
app.kubernetes.io/name: topoproxy
app.kubernetes.io/component: node
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "topoproxy.selector" -}}
app.kubernetes.io/name: topoproxy
app.kubernetes.io/component: node
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "topoproxy.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}
