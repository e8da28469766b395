// A hook server out of koordlet's own parts: its gRPC server, its plugins, its rules, its registration. What
// koordlet learns from the cluster (the node's pools) comes from flags.
//
// It is built inside of Koordinator's module (build.sh), since two of its packages need that module's versions.
package main

import (
	"encoding/json"
	"flag"
	"os"
	"os/signal"
	"syscall"

	topov1alpha1 "github.com/k8stopologyawareschedwg/noderesourcetopology-api/pkg/apis/topology/v1alpha1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/koordinator-sh/koordinator/apis/extension"
	"github.com/koordinator-sh/koordinator/pkg/koordlet/resourceexecutor"
	"github.com/koordinator-sh/koordinator/pkg/koordlet/runtimehooks/hooks"
	"github.com/koordinator-sh/koordinator/pkg/koordlet/runtimehooks/hooks/cpuset"
	"github.com/koordinator-sh/koordinator/pkg/koordlet/runtimehooks/hooks/gpu"
	"github.com/koordinator-sh/koordinator/pkg/koordlet/runtimehooks/proxyserver"
	"github.com/koordinator-sh/koordinator/pkg/koordlet/runtimehooks/rule"
	"github.com/koordinator-sh/koordinator/pkg/koordlet/statesinformer"
	"github.com/koordinator-sh/koordinator/pkg/runtimeproxy/config"
)

func main() {
	klog.InitFlags(nil)
	socket := flag.String("socket", "", "where to listen")
	directory := flag.String("directory", "", "where to register: koordlet.json is written there")
	policy := flag.String("policy", "Fail", "failure policy: Fail or Ignore")
	shared := flag.String("shared", "", "the shared pool's CPUs")
	manager := flag.String("manager", "none", "kubelet's CPU manager policy")
	flag.Parse()

	stop := make(chan struct{})
	executor := resourceexecutor.NewResourceUpdateExecutor()
	go executor.Run(stop)
	options := hooks.Options{Reader: resourceexecutor.NewCgroupReader(), Executor: executor}
	cpuset.Object().Register(options)
	gpu.Object().Register(options)
	rule.UpdateRules(statesinformer.RegisterTypeNodeTopology, topology(*shared, *manager), &statesinformer.CallbackTarget{})

	server, err := proxyserver.NewServer(proxyserver.Options{
		Network:             "unix",
		Address:             *socket,
		HostEndpoint:        *socket,
		FailurePolicy:       config.FailurePolicyType(*policy),
		PluginFailurePolicy: config.PolicyFail,
		ConfigFilePath:      *directory,
		Executor:            executor,
	})
	for _, step := range []func() error{server.Setup, server.Start, server.Register} {
		if err == nil {
			err = step()
		}
	}
	if err != nil {
		klog.Fatalf("cannot serve hooks: %v", err)
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt)
	<-signals
	server.Stop()
	close(stop)
}

func topology(shared, manager string) *topov1alpha1.NodeResourceTopology {
	annotations := map[string]string{
		extension.AnnotationNodeCPUSharedPools:       text([]extension.CPUSharedPool{{CPUSet: shared}}),
		extension.AnnotationKubeletCPUManagerPolicy: text(extension.KubeletCPUManagerPolicy{Policy: manager}),
	}
	return &topov1alpha1.NodeResourceTopology{ObjectMeta: metav1.ObjectMeta{Annotations: annotations}}
}

func text(value any) string {
	data, err := json.Marshal(value)
	if err != nil {
		klog.Fatalf("cannot write JSON: %v", err)
	}
	return string(data)
}
