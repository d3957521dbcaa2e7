/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doctor_gpu.c - driver, devices, NVML, and memory tried out: this process makes and
 * exports as kvmd does, without a context; probes import as engines do.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/nvml_syms.h"
#include "tools/kvmctl/doctor.h"

struct device {
	int ordinal;
	kv_cu_device dev;
	char uuid[48];
	char name[64];
};

/* An NVIDIA display or 3D controller on the bus. */
static bool pci_has_gpu(void)
{
	DIR *dir = opendir("/sys/bus/pci/devices");
	bool found = false;
	struct dirent *d;

	while (dir && (d = readdir(dir)) && !found) {
		char path[320], vendor[16] = "", class[16] = "";
		FILE *f;

		snprintf(path, sizeof(path), "/sys/bus/pci/devices/%.200s/vendor",
			 d->d_name);
		f = fopen(path, "re");
		if (!f)
			continue;
		found = fgets(vendor, sizeof(vendor), f) && !strncmp(vendor, "0x10de", 6);
		fclose(f);
		snprintf(path, sizeof(path), "/sys/bus/pci/devices/%.200s/class",
			 d->d_name);
		f = found ? fopen(path, "re") : NULL;
		found = f && fgets(class, sizeof(class), f) && !strncmp(class, "0x03", 4);
		if (f)
			fclose(f);
	}
	if (dir)
		closedir(dir);
	return found;
}

static void no_driver(struct doctor *doc, int r, const char *text)
{
	if (r == -ENOENT && !pci_has_gpu())
		doc_say(doc, DOC_OK, "driver", "",
			"no GPU on this host: kvmd serves host memory");
	else if (r == -ENOENT)
		doc_say(doc, DOC_FAIL, "driver",
			"install the NVIDIA driver; in a container start it with its GPUs",
			"a GPU is on the bus and there is no driver: %s", text);
	else
		doc_say(doc, DOC_FAIL, "driver", "install a driver of CUDA 12 or newer",
			"the driver is too old: %s", text);
}

/* ------------------------------------------------------------------------ NVML */

static void say_modes(struct doctor *doc, const struct kv_nvml_syms *nv,
		      const struct device *d)
{
	unsigned now = 0, later = 0;
	kv_nv_device dev;
	int mode = 0;

	if (nv->by_uuid(d->uuid, &dev)) {
		doc_say(doc, DOC_WARN, "nvml", "", "%s: NVML does not know it", d->uuid);
		return;
	}
	if (nv->persistence(dev, &mode))
		doc_say(doc, DOC_SKIP, "persistence", "", "%s: cannot be read", d->uuid);
	else if (mode)
		doc_say(doc, DOC_OK, "persistence", "", "%s: on", d->uuid);
	else
		doc_say(doc, DOC_WARN, "persistence",
			"nvidia-smi -pm 1, or run nvidia-persistenced",
			"%s: off: exported memory dies when the last process closes the GPU",
			d->uuid);
	if (nv->mig(dev, &now, &later) || !now)
		doc_say(doc, DOC_OK, "mig", "", "%s: off", d->uuid);
	else
		doc_say(doc, DOC_WARN, "mig", "nvidia-smi -mig 0",
			"%s: on: kvmd serves whole GPUs, and NVML lists processes per "
			"instance",
			d->uuid);
}

static void say_nvml(struct doctor *doc, const struct device *devices, int nr)
{
	struct kv_nvml_syms nv;
	char text[160], version[96] = "?";
	kv_nv_result r = 0;

	if (kv_nvml_load(&nv, text, sizeof(text)) || (r = nv.init())) {
		if (r)
			snprintf(text, sizeof(text), "nvmlInit: NVML result %d", r);
		doc_say(doc, DOC_WARN, "nvml",
			"install libnvidia-ml.so.1 of the driver's version",
			"%s: an engine killed in a step keeps its pages from use, because "
			"nothing proves that its work has ended",
			text);
		return;
	}
	nv.driver_version(version, sizeof(version));
	doc_say(doc, DOC_OK, "nvml", "", "driver %s", version);
	for (int i = 0; i < nr; i++)
		say_modes(doc, &nv, &devices[i]);
	nv.shutdown();
}

static void say_compute_mode(struct doctor *doc, const struct kv_cuda_syms *cu,
			     const struct device *d)
{
	int mode = 0;

	if (cu->device_attr(&mode, KV_CU_ATTR_COMPUTE_MODE, d->dev))
		return;
	if (mode == 0)
		doc_say(doc, DOC_OK, "compute-mode", "", "%s: default", d->uuid);
	else if (mode == 2)
		doc_say(doc, DOC_FAIL, "compute-mode", "nvidia-smi -c DEFAULT",
			"%s: prohibited: no engine can use it", d->uuid);
	else
		doc_say(doc, DOC_WARN, "compute-mode", "nvidia-smi -c DEFAULT",
			"%s: exclusive: one engine at a time (kvmd itself needs none)",
			d->uuid);
}

static void say_mps(struct doctor *doc)
{
	const char *dir = getenv("CUDA_MPS_PIPE_DIRECTORY");
	char path[400];
	struct stat st;

	snprintf(path, sizeof(path), "%.380s/control", dir ? dir : "/tmp/nvidia-mps");
	if (stat(path, &st))
		doc_say(doc, DOC_OK, "mps", "",
			"not running: engines on one GPU share it by time slices (steps of "
			"0.5 ms lose 20 %% in total, of 11 ms 9 %%)");
	else
		doc_say(doc, DOC_WARN, "mps",
			"one MPS server a domain; stop an engine only when its steps have "
			"retired, else with terminate_client",
			"%s: runs: no loss by time slices, but engines of one server fail "
			"together, and one killed in a step keeps its pages from use",
			path);
}

/* ----------------------------------------------------------------- memory, tried out */

static int make_extent(const struct kv_cuda_syms *cu, const struct device *d, int *ret_fd,
		       char *text, size_t bytes)
{
	const struct kv_cu_alloc_prop prop = {
		.type = KV_CU_PINNED,
		.handle_types = KV_CU_POSIX_FD,
		.location = {.type = KV_CU_DEVICE, .id = d->dev},
	};
	const char *what = "cuMemCreate";
	kv_cu_handle handle;
	kv_cu_result cr;
	int fd = -1;

	cr = cu->mem_create(&handle, DOC_PROBE_BYTES, &prop, 0);
	if (!cr) {
		what = "cuMemExportToShareableHandle";
		cr = cu->mem_export(&fd, handle, KV_CU_POSIX_FD, 0);
		cu->mem_release(handle);
	}
	if (cr) {
		snprintf(text, bytes, "%s: CUDA result %d (%s)", what, cr,
			 kv_cuda_reason(cr));
		return kv_cuda_errno(cr);
	}
	fcntl(fd, F_SETFD, FD_CLOEXEC);
	*ret_fd = fd;
	return 0;
}

static void say_listed(struct doctor *doc, const struct device *d, int listed)
{
	if (listed > 0)
		doc_say(doc, DOC_OK, "nvml-pids", "",
			"%s: NVML lists a process of this pid namespace", d->uuid);
	else if (listed == 0)
		doc_say(doc, DOC_WARN, "nvml-pids",
			"run kvmd in the host's pid namespace (--pid=host)",
			"%s: NVML does not list our process by its pid: an engine killed in "
			"a step keeps its pages from use",
			d->uuid);
}

/* What kvmd and engines do, and whether the bytes are right. Return: it works */
static bool probe_vmm(struct doctor *doc, const struct kv_cuda_syms *cu,
		      const struct device *d)
{
	static const char todo[] =
		"look for a container that withholds /dev/nvidia-caps or filters "
		"descriptors; else --backend cuda-legacy (one domain, needs the legacy probe "
		"below) or --backend host";
	struct doc_answer a;
	int fd = -1;

	if (make_extent(cu, d, &fd, a.text, sizeof(a.text))) {
		doc_say(doc, DOC_FAIL, "vmm", todo, "%s: %s", d->uuid, a.text);
		return false;
	}
	doc_probe_run(doc, DOC_WRITE, d->ordinal, fd, &a);
	if (!a.result) {
		say_listed(doc, d, a.listed);
		doc_probe_run(doc, DOC_READ, d->ordinal, fd, &a);
	}
	close(fd);
	if (a.result == -EAGAIN)
		doc_say(doc, DOC_SKIP, "vmm", "", "%s: %s", d->uuid, a.text);
	else if (a.result == 1)
		doc_say(doc, DOC_FAIL, "vmm", todo,
			"%s: %llu of 64 Mi bytes differ between two importers", d->uuid,
			(unsigned long long)a.nr_bad);
	else if (a.result)
		doc_say(doc, DOC_FAIL, "vmm", todo, "%s: %s", d->uuid, a.text);
	else
		doc_say(doc, DOC_OK, "vmm", "",
			"%s: made, exported, written by one process, read by another",
			d->uuid);
	return !a.result;
}

/* G3 rests on it: memory that goes to another domain comes back zeroed (facts F-scrub). */
static void probe_scrub(struct doctor *doc, const struct kv_cuda_syms *cu,
			const struct device *d, bool vmm_works)
{
	struct doc_answer a;
	int fd = -1;

	if (!vmm_works) {
		doc_say(doc, DOC_SKIP, "scrub", "", "%s: needs the vmm probe to work",
			d->uuid);
		return;
	}
	/* The vmm probe has just written this much and given it back. */
	if (make_extent(cu, d, &fd, a.text, sizeof(a.text))) {
		doc_say(doc, DOC_SKIP, "scrub", "", "%s: %s", d->uuid, a.text);
		return;
	}
	doc_probe_run(doc, DOC_ZERO, d->ordinal, fd, &a);
	close(fd);
	if (a.result == 1)
		doc_say(doc, DOC_FAIL, "scrub",
			"put only tenants that trust each other on this host; remove the "
			"driver setting that turns scrubbing off",
			"%s: fresh memory holds %llu bytes that are not zero: domains "
			"could read each other's pages",
			d->uuid, (unsigned long long)a.nr_bad);
	else if (a.result)
		doc_say(doc, DOC_SKIP, "scrub", "", "%s: %s", d->uuid, a.text);
	else
		doc_say(doc, DOC_OK, "scrub", "",
			"%s: 64 MiB came back zeroed after other bytes were in use",
			d->uuid);
}

static void probe_legacy(struct doctor *doc, const struct device *d)
{
	struct doc_answer a;

	doc_probe_run(doc, DOC_LEGACY, d->ordinal, -1, &a);
	if (!a.result)
		doc_say(doc, DOC_OK, "legacy", "", "%s: cuIpc handles work", d->uuid);
	else
		doc_say(doc, DOC_OK, "legacy", "",
			"%s: cuIpc handles do not work (%s); nothing needs them where vmm "
			"works",
			d->uuid, a.result == 1 ? "other bytes" : a.text);
}

/* --------------------------------------------------------------------------- all */

static int find_devices(struct doctor *doc, const struct kv_cuda_syms *cu,
			struct device *devices, int max)
{
	int count = 0, nr = 0;

	if (cu->device_count(&count))
		return 0;
	for (int i = 0; i < count && nr < max; i++) {
		struct device *d = &devices[nr];
		size_t bytes = 0;
		cJSON *json;
		int n = 4;
		u8 uuid[16];

		d->ordinal = i;
		if (cu->device_get(&d->dev, i) || cu->device_uuid(uuid, d->dev) ||
		    cu->device_name(d->name, sizeof(d->name) - 1, d->dev) ||
		    cu->device_bytes(&bytes, d->dev))
			continue;
		strcpy(d->uuid, "GPU-");
		for (int k = 0; k < 16; k++)
			n += sprintf(d->uuid + n, "%s%02x",
				     k == 4 || k == 6 || k == 8 || k == 10 ? "-" : "",
				     uuid[k]);
		doc->gpu_bytes = KV_MAX(doc->gpu_bytes, (u64)bytes);
		json = cJSON_CreateObject();
		cJSON_AddStringToObject(json, "uuid", d->uuid);
		cJSON_AddStringToObject(json, "name", d->name);
		cJSON_AddNumberToObject(json, "bytes", (double)bytes);
		cJSON_AddItemToArray(doc->devices, json);
		doc_say(doc, DOC_OK, "device", "", "%s  %s  %.1f GiB", d->uuid, d->name,
			(double)bytes / (1 << 30));
		nr++;
	}
	return nr;
}

void doc_gpu(struct doctor *doc)
{
	struct device devices[16];
	struct kv_cuda_syms cu;
	int r, nr, version = 0;
	kv_cu_result cr;
	char text[160];
	bool works;

	r = kv_cuda_load(&cu, text, sizeof(text));
	if (r) {
		no_driver(doc, r, text);
		return;
	}
	r = doc_spawner_start(doc);
	cr = cu.init(0);
	if (cr) {
		doc_say(doc,
			kv_cuda_errno(cr) == -ENODEV && !pci_has_gpu() ? DOC_OK
								       : DOC_FAIL,
			"driver", "see dmesg for NVRM and Xid lines",
			"cuInit: CUDA result %d (%s)", cr, kv_cuda_reason(cr));
		doc_spawner_stop(doc);
		return;
	}
	cu.driver_version(&version);
	doc_say(doc, DOC_OK, "driver", "", "speaks CUDA %d.%d", version / 1000,
		version % 1000 / 10);
	nr = find_devices(doc, &cu, devices, KV_ARRAY_SIZE(devices));
	if (nr > 1)
		doc_say(doc, DOC_OK, "devices", "",
			"%d: one kvmd serves one of them, named by --gpu", nr);
	say_nvml(doc, devices, nr);
	say_mps(doc);
	for (int i = 0; i < nr; i++) {
		say_compute_mode(doc, &cu, &devices[i]);
		if (r) {
			doc_say(doc, DOC_SKIP, "vmm", "", "no process for probes: %s",
				strerror(-r));
			continue;
		}
		works = probe_vmm(doc, &cu, &devices[i]);
		probe_scrub(doc, &cu, &devices[i], works);
		probe_legacy(doc, &devices[i]);
	}
	doc_spawner_stop(doc);
}
