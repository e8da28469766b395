"""Makes the parts that query kubelet, or that serve parts of its API in its place, from the configuration.

As in ``proxy.assembly``, modules that only some nodes use are imported where they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.backends.kubelet.cpu_manager import KubeletCpuManagerReader
from proxy.backends.kubelet.settings import KubeletSettings
from proxy.sockets.unix_socket import is_in_use
from proxy.topology.devices import SysfsDevices

if TYPE_CHECKING:
    from proxy.backends.cluster.files import AgentFiles
    from proxy.backends.device_plugins.registry import DevicePluginRegistry
    from proxy.config.schema import Config
    from proxy.executor.context import NodeContext
    from proxy.executor.device_manager_conflicts import OtherManagers
    from proxy.executor.device_ports import DevicePlugins, KubeletAllocations
    from proxy.executor.node_executor import NodeExecutor
    from proxy.executor.ports import Kubelet, KubeletCpuManager
    from proxy.frontends.device_registration.service import DevicePluginService
    from proxy.frontends.podresources.service import PodResourcesService


def kubelet_of(config: Config, context: NodeContext, files: AgentFiles | None) -> Kubelet | None:
    """Return the sources of kubelet's facts; None if none is configured."""
    settings, report_problem = config.kubelet, context.telemetry.problem
    client: Kubelet | None = None
    if settings.pods or settings.pods_api or settings.pod_resources:
        from proxy.backends.kubelet.client import KubeletClient

        report_resolved = context.telemetry.resolved
        client = KubeletClient(_kubelet_settings(config), report_problem, report_resolved=report_resolved)
    if files is None:
        return client
    from proxy.backends.cluster.pod_facts import PodFactSources

    return PodFactSources(files.pods, client, report_problem)


def kubelet_cpu_manager_of(config: Config, context: NodeContext) -> KubeletCpuManager:
    """Return the reader of the state of kubelet's CPU manager."""
    settings = config.kubelet
    return KubeletCpuManagerReader(
        _kubelet_settings(config),
        str(settings.state_dir),
        str(settings.config_file or ""),
        lambda: context.state.node.topology,
    )


def kubelet_allocations_of(config: Config, context: NodeContext) -> KubeletAllocations | None:
    """Make the reader of the devices that kubelet has assigned; None if no device plugins are served."""
    if not config.device_plugins.enabled:
        return None
    from proxy.backends.kubelet.device_checkpoint import KubeletDevicesReader

    return KubeletDevicesReader(str(config.kubelet.state_dir), context.telemetry)


def pod_resources_of(config: Config, executor: NodeExecutor) -> PodResourcesService:
    """Make the server of the pod-resources API. Call it in a thread: it imports much."""
    from proxy.backends.kubelet.shared_pod_resources import SharedPodResources
    from proxy.frontends.podresources.service import PodResourcesService

    path, kubelet = config.pod_resources.serve, config.kubelet.pod_resources
    assert path is not None
    return PodResourcesService(path, executor, SharedPodResources(str(kubelet)) if kubelet else None)


def device_plugin_registry_of(config: Config, context: NodeContext) -> DevicePlugins | None:
    """Make the registry of device plugins; None if they are not served."""
    if not config.device_plugins.enabled:
        return None
    from proxy.backends.device_plugins.registry import DevicePluginRegistry

    return DevicePluginRegistry(context, config.device_plugins.timeout)


def device_plugins_of(config: Config, executor: NodeExecutor) -> DevicePluginService:
    """Make the server for registrations of device plugins."""
    import proxy.frontends.cri.device_suffix  # noqa: F401  no call must import it
    from proxy.backends.device_plugins.registry import DevicePluginRegistry
    from proxy.frontends.device_registration.service import DevicePluginService

    plugins = executor.device_plugins
    assert isinstance(plugins, DevicePluginRegistry)
    kubelet = None
    if config.device_plugins.shim:
        from proxy.backends.device_plugins.kubelet_registration import KubeletRegistration

        shim_directory = config.device_plugins.shim_directory
        kubelet = KubeletRegistration(config.kubelet.plugin_directory, shim_directory)
    return DevicePluginService(
        config.device_plugins, executor, plugins, _other_managers(config, executor, plugins), kubelet
    )


def _other_managers(
    config: Config, executor: NodeExecutor, plugins: DevicePluginRegistry
) -> OtherManagers | None:
    """Make the check for resources with two managers; None if kubelet is not queried."""
    if config.kubelet.pod_resources is None:
        return None
    from proxy.backends.kubelet.managed_elsewhere import OtherManagersReader
    from proxy.backends.kubelet.shared_pod_resources import SharedPodResources
    from proxy.executor.device_manager_conflicts import OtherManagers

    sysfs = SysfsDevices(config.sysfs_root, procfs_root=config.procfs_root)
    reader = OtherManagersReader(
        SharedPodResources(str(config.kubelet.pod_resources)),
        lambda name: sysfs.locate_device(name).functions,
        executor.telemetry,
    )
    return OtherManagers(executor, reader.read, plugins.withdraw, is_in_use)


def _kubelet_settings(config: Config) -> KubeletSettings:
    """Return the settings with which kubelet is queried."""
    settings = config.kubelet
    return KubeletSettings(
        pods_url=settings.pods,
        pods_api=str(settings.pods_api or ""),
        pod_resources=str(settings.pod_resources or ""),
        token_file=str(settings.token_file or ""),
        ca_file=str(settings.ca_file or ""),
        cert_file=str(settings.cert_file or ""),
        key_file=str(settings.key_file or ""),
        insecure=settings.insecure_skip_verify,
        timeout=settings.timeout,
        configz=settings.configz,
    )
