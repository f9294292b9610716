#pragma once
#define MAX_BYTES 16
