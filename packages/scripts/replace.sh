# A daemon that runs is replaced without a failed call. 69: it does not answer, or is of a version that cannot be
# replaced; then it is restarted, and the socket keeps listening meanwhile. 1: this version cannot start here, and the
# one before continues.
replace_daemon() {
    if systemctl is-active --quiet topoproxy.service; then
        topoproxy upgrade --now >&2 && code=0 || code=$?
        case $code in
        0) ;;
        69) systemctl try-restart topoproxy.service || : ;;
        *) echo "topoproxy: the daemon of the version before continues (topoproxy upgrade --check)" >&2 ;;
        esac
    fi
}
