/* SPDX-License-Identifier: Apache-2.0 */
/* Any text as a tokenizer.json; what loads must encode and decode without losing a byte
 * that it accepts. */
#include <errno.h>

#include "tests/fuzz/fuzz.h"
#include "engine/model/tokenizer.h"

static const char sample[] = "The quick brown fox, 123 \xc3\xa9t\xc3\xa9.\n  a";

static void use(const struct eng_tokenizer *tok)
{
	u32 *ids = NULL;
	size_t nr = 0, bytes = 0;
	char *text = NULL;
	int r;

	r = eng_tokenizer_encode(tok, sample, sizeof(sample) - 1, 0, &ids, &nr);
	FUZZ_CHECK(r == 0 || r == -EINVAL || r == -ENOMEM);
	if (r)
		return;
	for (size_t i = 0; i < nr; i++)
		FUZZ_CHECK(ids[i] < eng_tokenizer_size(tok));
	FUZZ_CHECK(!eng_tokenizer_decode(tok, ids, nr, false, &text, &bytes));
	free(text);
	free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct eng_tokenizer *tok = NULL;
	struct eng_err err = {0};
	int r;

	r = eng_tokenizer_load(fuzz_file(data, bytes), &tok, &err);
	FUZZ_CHECK(r <= 0);
	if (r) {
		FUZZ_CHECK(err.text[0] || r == -ENOMEM);
		return 0;
	}
	use(tok);
	eng_tokenizer_free(tok);
	return 0;
}
