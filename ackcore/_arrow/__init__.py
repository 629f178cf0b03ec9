"""Arrow data: conversion to a ledger's columns and to Python, hashes of rows, cuts of batches."""
