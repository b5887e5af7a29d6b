// `sluice schedule` as a program of its own: linked with the room that explores schedules alone.
#include "runtime/explore/schedule_command.hpp"

int main(int argc, char** argv) { return sluice::schedule_command({argv + 1, argv + argc}); }
