{{- define "topoproxyScheduler.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" | trimSuffix "-scheduler" }}-scheduler
{{- end }}

{{- define "topoproxyScheduler.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}
