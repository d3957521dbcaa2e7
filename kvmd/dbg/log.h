/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dbg/log.h - one line per event, rate limited per call site.
 *
 * A hostile client must not be able to fill a disk: each call site may write
 * KVD_LOG_BURST lines in KVD_LOG_WINDOW_NS; what was left out is counted and said with
 * the next line.
 *
 * Thread rules: the loop thread only. State is file-scope (allowed in dbg/).
 */
#ifndef KVD_DBG_LOG_H
#define KVD_DBG_LOG_H

#include "base/util.h"

enum kvd_log_level { KVD_LOG_ERR, KVD_LOG_WARN, KVD_LOG_INFO, KVD_LOG_DBG };

#define KVD_LOG_BURST	  10u
#define KVD_LOG_WINDOW_NS 5000000000ull

/* One per call site, made by the macros below. */
struct kvd_log_site {
	u64 window_start_ns;
	u32 nr_lines;
	u32 nr_suppressed;
};

/**
 * kvd_log_setup() - where lines go and which
 * @fd: file descriptor, stays the caller's
 * @level: lines above it are dropped
 */
void kvd_log_setup(int fd, enum kvd_log_level level);

/**
 * kvd_log_write() - used by the macros
 * @obj: what the line is about ("ipc/conn 17"); printed in front
 */
void kvd_log_write(struct kvd_log_site *site, enum kvd_log_level level, const char *obj,
		   const char *fmt, ...) __attribute__((format(printf, 4, 5)));

/** kvd_log_lines() - lines written and lines left out since start */
void kvd_log_lines(u64 *ret_written, u64 *ret_suppressed);

#define kvd_log_(level, obj, ...)                               \
	do {                                                    \
		static struct kvd_log_site site_;               \
		kvd_log_write(&site_, level, obj, __VA_ARGS__); \
	} while (0)

#define kvd_err(obj, ...)  kvd_log_(KVD_LOG_ERR, obj, __VA_ARGS__)
#define kvd_warn(obj, ...) kvd_log_(KVD_LOG_WARN, obj, __VA_ARGS__)
#define kvd_info(obj, ...) kvd_log_(KVD_LOG_INFO, obj, __VA_ARGS__)
#define kvd_dbg(obj, ...)  kvd_log_(KVD_LOG_DBG, obj, __VA_ARGS__)

#endif
