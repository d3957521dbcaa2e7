/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a safetensors file: refused by name, or every tensor lies in the file. */
#include "tests/fuzz/fuzz.h"
#include "engine/model/safetensors.h"

static void check_tensor(const struct eng_tensor *t)
{
	volatile u8 sum = 0;
	u64 bytes = eng_st_dtype_bytes(t->dtype);

	for (u32 i = 0; i < t->nr_dims; i++)
		bytes *= t->shape[i];
	FUZZ_CHECK(bytes == t->bytes || t->dtype == ENG_ST_OTHER);
	/* ASan and the end of the mapping see what is outside */
	for (u64 i = 0; i < t->bytes; i += KV_MAX(t->bytes / 64, (u64)1))
		sum = (u8)(sum + ((const u8 *)t->data)[i]);
	if (t->bytes)
		sum = (u8)(sum + ((const u8 *)t->data)[t->bytes - 1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct eng_tensors ts = {0};
	struct eng_err err = {0};

	if (eng_shard_open(fuzz_file(data, bytes), &ts, &err)) {
		FUZZ_CHECK(err.text[0]);
		return 0;
	}
	for (size_t i = 0; i < ts.nr; i++) {
		check_tensor(&ts.list[i]);
		FUZZ_CHECK(eng_tensors_find(&ts, ts.list[i].name) == &ts.list[i]);
	}
	eng_tensors_close(&ts);
	return 0;
}
