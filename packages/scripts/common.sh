booted() { [ -z "$root" ] && [ -d /run/systemd/system ]; }

# The state directory, and one that the configuration names instead; without ending slashes.
state_dirs() {
    echo /var/lib/topoproxy
    cat "$root/etc/topoproxy/config.yaml" "$root"/etc/topoproxy/config.d/*.yaml 2>/dev/null |
        sed -n "s|^stateDir:[[:space:]]*[\"']\{0,1\}\(/[^\"'#[:space:]]*\).*|\1|p" | sed 's|/*$||'
}

forget_bytecode() {
    if [ -d "$root/usr/lib/topoproxy" ]; then
        find "$root/usr/lib/topoproxy" -name __pycache__ -type d -prune -exec rm -rf {} +
    fi
}

# Without it, the first start after each installation would compile some hundred modules. The daemon itself may not
# write there.
compile() {
    forget_bytecode
    if [ -x "$root/usr/lib/topoproxy/bin/python" ]; then
        "$root/usr/lib/topoproxy/bin/python" -I -m compileall -q ${root:+-s "$root" -p /} \
            "$root/usr/lib/topoproxy/lib/python3/site-packages" >/dev/null 2>&1 || :
    fi
}

leave() {
    if booted; then
        systemctl --no-reload disable --now topoproxy.service topoproxy.socket >/dev/null 2>&1 || :
    fi
    # Without a running systemd, as in a build of an image, the links of an enabled unit are removed here.
    rm -f "$root"/etc/systemd/system/*.wants/topoproxy.service "$root"/etc/systemd/system/*.wants/topoproxy.socket
    forget_bytecode
}
