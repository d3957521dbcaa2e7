/* SPDX-License-Identifier: Apache-2.0 */
/*
 * health.c - what to do about each of kvmd's health reasons, in a line; docs/operations.md
 * says more. tools/check-operations holds both to the codes that kvmd has.
 */
#include <string.h>

#include "tools/kvmctl/kvmctl.h"

static const struct {
	const char *code;
	const char *todo;
} todos[] = {
	{"ADOPT_DAMAGE", "look for memory errors (dmesg, ECC counters)"},
	{"AUDIT_DAMAGE",
	 "keep the output of kvmctl audit --json, then kvmctl upgrade: it rebuilds all from its records"},
	{"CHECK_OFF",
	 "\"check\": \"batch\" in the policy; engines of before connect again"},
	{"EVENTS_UNREAD", "the engine must call kvc_dispatch(): its authors"},
	{"EXTENTS_HELD", "restart that engine"},
	{"FAULTS_ARMED", "start kvmd without --faults"},
	{"GPU_FAILED", "see the findings below"},
	{"GPU_NO_NVML", "install libnvidia-ml"},
	{"GPU_POLICY", "mend the line of the policy that it names"},
	{"GPU_STARTING", "wait; persistence mode makes it short"},
	{"GPU_UNUSED", "--backend cuda, or the driver's fault that it names"},
	{"GPU_WORK_UNPROVEN", "wait for the kernels; under MPS terminate that client"},
	{"INCIDENTS", "kvmctl incidents: of one engine its bug, of many ours"},
	{"LEGACY_ISOLATION", "a driver that exports memory as descriptors"},
	{"LOOP_EPOLL",
	 "allow io_uring (kernel.io_uring_disabled, the container's filter)"},
	{"MOVER_DOWN", "see the findings below; it is tried again every 30 s"},
	{"MOVER_UNPROVEN", "wait for the copies; under MPS terminate that client"},
	{"NO_KEEPER", "restart kvmd in a quiet minute: a kill -9 would lose all now"},
	{"NO_SECCOMP", "a kernel or container that allows system call filters"},
	{"PIDFD_RACED", "Linux 6.5 or later"},
	{"QUOTA_DEFERRED", "wait, kvmctl evict, or raise the limit"},
	{"RUNS_AS_ROOT", "--user kvmd, or the unit file"},
	{"SESSION_LINGERS",
	 "wait for that engine's last step; if it stays, as GPU_WORK_UNPROVEN"},
	{"STEP_STALLED", "that engine hangs: end it, or on_stall: kill in the policy"},
	{"TENANT_DRAINING", "kvmctl drain TENANT --off"},
	{"TEST_LAYOUTS", "start kvmd without the option for tests"},
	{"TIER_BAD_PAGES", "look for disk and memory errors; kvmctl tier counts by kind"},
	{"TIER_FILLING", "wait"},
	{"TIER_JOURNAL_LOST", "make room on the NVMe tier's file system"},
	{"TIER_NVME_NO_DIRECT", "put the tier on ext4 or xfs"},
	{"TIER_NVME_SLOW_IO", "allow io_uring, raise memlock"},
	{"TIER_NVME_WRITES_OFF",
	 "make room, or replace the disk; tried again after 10 s"},
};

/** ctl_health_todo() - what to do about @code. Return: a line, never NULL */
const char *ctl_health_todo(const char *code)
{
	for (size_t i = 0; i < KV_ARRAY_SIZE(todos); i++)
		if (!strcmp(todos[i].code, code))
			return todos[i].todo;
	return "docs/operations.md"; /* of a kvmd that is newer */
}
